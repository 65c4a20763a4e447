"""Section of the report about lemons: rules judged forward in time, and the nodes to look at now."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.fleet.episodes import Faults, merge
from keepstep.fleet.lemon_features import SIGNALS, feature_matrix, forward_scores
from keepstep.fleet.lemons import (
    NodeEvents,
    at_equal_flags,
    counts_before,
    days_before,
    decayed_before,
    judge_dates,
    judge_rule,
    outcomes_after,
    told_apart,
    tuned_decay,
)
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_report_faults import NodeFaults, node_events
from keepstep.service.fleet_sheet import Section, Sheet, sheet

__all__ = ["lemons_section"]

_LEAST = (1, 2, 3)
_SAME_DAYS = 0.25
_REFERENCE = ">= 2 in 28 days"
_SHOWN_NODES = 15
_PINNED = """
SELECT e.cluster || '/' || trim(n.node) AS node, e.time
FROM failure_events e, unnest(string_split(e.nodes, ',')) AS n(node), attempts a
WHERE a.attempt_id = e.first AND e.nodes <> '' AND e.time IS NOT NULL AND coalesce(a.node_count, 1) {which}
"""
_RESULTS = """
SELECT cluster || '/' || node AS node, time FROM health_results WHERE time IS NOT NULL AND {which}
"""
_EXCLUDED = """
SELECT cluster || '/' || node AS node, onset AS time FROM incidents
WHERE members_changed > 0 AND node <> '' AND onset IS NOT NULL AND NOT coalesce(drill, false)
"""
_SINGLE = """
SELECT a.cluster || '/' || n.node AS node, a.start, coalesce(a."end", a.last_seen) AS "end"
FROM attempts a JOIN attempt_nodes n USING (attempt_id)
WHERE a.node_count = 1 AND a.start IS NOT NULL AND coalesce(a."end", a.last_seen) >= a.start
"""
_QUERIES = {
    "xids": _RESULTS.format(which="xid IS NOT NULL"),
    "failed_checks": _RESULTS.format(which="status = 2"),
    "excluded": _EXCLUDED,
    "multi_node_failures": _PINNED.format(which="> 1"),
    "single_node_failures": _PINNED.format(which="= 1"),
}
_RULE_SHOWN = (
    ("rule", "{rule}"),
    ("flagged", "{flagged:,}"),
    ("hits", "{hits:,}"),
    ("precision [95 %]", "{precision:.3f} [{low:.3f}, {high:.3f}]"),
    ("recall", "{recall:.3f}"),
    ("lift", "{lift:.2f}"),
    ("idle node-days", "{idle_node_days:,.0f}"),
)


def lemons_section(data: FleetData, known: NodeFaults) -> Section:
    """Rules on the past 28 days, judged on the next 28; the best is said only if it can be told apart."""
    signals = _signals(data, known)
    outcome_of = _outcome(signals, known)
    dates = judge_dates(known.horizon)
    if not len(outcome_of.node) or len(dates) < 2:
        events = len(outcome_of.node)
        said = f"rules cannot be judged: {events} events on nodes in {known.horizon:.0f} days (at least 84 are needed)"
        return Section("lemons", "Nodes that fail again and again", (said,))
    outcome = outcomes_after(outcome_of, dates)
    counts = counts_before(outcome_of, dates)
    rng = data.rng(6)
    flags = {f">= {least} in 28 days": counts >= least for least in _LEAST}
    reference = flags[_REFERENCE]
    features = feature_matrix(signals, dates, single_node_days=_single_node_days(data, known, dates=dates))
    scores = {
        "decayed counts, decay chosen on the past": tuned_decay(outcome_of, dates, flags=reference),
        "logistic score fitted on the past": forward_scores(features, outcome, dates=dates),
    }
    flags |= {name: at_equal_flags(score, reference) for name, score in scores.items()}
    rows = [judge_rule(name, chosen, outcome=outcome, rng=rng) for name, chosen in flags.items()]
    against = (_REFERENCE, reference)
    differences = [told_apart((name, flags[name]), against, outcome=outcome, rng=rng) for name in scores]
    better = [found.rule for found in differences if found.verdict == "better"]
    base = rows[0]
    words = (
        f"judged at {len(dates)} dates 28 days apart: a rule sees the days before, its word is held against the 28 "
        f"days after; {base.failing:,} of {base.node_dates:,} node-dates had a failure ({base.base_rate:.4f})",
        f"at equal flags these are better than {_REFERENCE}: {', '.join(better)}"
        if better
        else f"no rule tried is told apart from {_REFERENCE} at equal flags (95 % interval over nodes)",
        "cost of a flag: the node is out until the next date; idle node-days are those of nodes without a failure then",
        f"signals in the data: {', '.join(name for name in SIGNALS if name in signals)}; no source has tickets yet",
    )
    return Section(
        "lemons",
        "Nodes that fail again and again",
        words,
        (
            sheet("lemon_rules", "Rules, judged forward in time", rows=rows, shown=_RULE_SHOWN),
            sheet("lemon_differences", "Against the simple rule at equal flags", rows=differences, shown=_DIFFERENCE),
            _now(known, signals, outcome_of=outcome_of),
        ),
    )


_DIFFERENCE = (
    ("rule", "{rule}"),
    ("against", "{against}"),
    ("precision gained [95 %]", "{difference:+.3f} [{low:+.3f}, {high:+.3f}]"),
    ("verdict", "{verdict}"),
)


def _signals(data: FleetData, known: NodeFaults) -> dict[str, NodeEvents]:
    """Events by signal, those that occur."""
    found = {}
    if len(known.faults.node):
        found["taken_out"] = NodeEvents(known.faults.node, known.faults.start, known.nodes)
    for name, text in _QUERIES.items():
        node, day = node_events(known, data.rows(text))
        if (node >= 0).any():
            found[name] = NodeEvents(node[node >= 0], day[node >= 0], known.nodes)
    return found


def _single_node_days(data: FleetData, known: NodeFaults, *, dates: Any) -> Any:
    """Days of single-node jobs on each node in the window before each date; None where no nodes of jobs are known."""
    if not data.store.rows("attempt_nodes"):
        return None
    rows = data.rows(_SINGLE)
    node, start = node_events(known, rows, time="start")
    end = node_events(known, rows, time="end")[1]
    here = node >= 0
    return days_before(node[here], (start[here], end[here]), dates=dates, nodes=known.nodes)


def _outcome(signals: dict[str, NodeEvents], known: NodeFaults) -> NodeEvents:
    """What a rule is to foresee: faults where they are recorded, else times down and failures of jobs pinned to the
    node; what comes within hours of each other is then one thing seen twice."""
    names = ("taken_out",) if known.recorded else ("taken_out", "multi_node_failures", "single_node_failures")
    parts = [signals[name] for name in names if name in signals]
    if not parts:
        return NodeEvents(np.empty(0, np.int64), np.empty(0), known.nodes)
    node, day = np.concatenate([part.node for part in parts]), np.concatenate([part.day for part in parts])
    if known.recorded:
        return NodeEvents(node, day, known.nodes)
    seen = merge(Faults.of(node, day, end=day), _SAME_DAYS)
    return NodeEvents(seen.node, seen.start, known.nodes)


def _now(known: NodeFaults, signals: dict[str, NodeEvents], *, outcome_of: NodeEvents) -> Sheet:
    """The nodes to look at now: most events in the last 28 days of the data, recent ones first."""
    today = np.array([known.last])
    recent = {name: counts_before(events, today)[0] for name, events in signals.items()}
    score = decayed_before(outcome_of, today, decay=14.0)[0]
    chosen = [int(at) for at in np.lexsort((np.arange(known.nodes), -score))[:_SHOWN_NODES] if score[at] > 0.05]
    rows: list[dict[str, Any]] = [
        {"node": known.names[at] if at < len(known.names) else f"#{at}", "score": float(score[at])}
        | {name: int(counts[at]) for name, counts in recent.items()}
        for at in chosen
    ]
    note = "events of the last 28 days by signal; score: events decayed over 14 days; worth a look, no verdict"
    return sheet("lemon_nodes", "Nodes to look at now", rows=rows, note=note)
