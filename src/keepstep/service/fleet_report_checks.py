"""Section of the report about health checks: what they changed, against nodes without them, and what they cost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.effect import PeriodCounts, alarms, effect_of
from keepstep.fleet.rates_nodes import dispersion
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_report_faults import DAY_US, NodeFaults, node_events
from keepstep.service.fleet_sheet import Section, sheet

__all__ = ["checks_section"]

_MOST_CHECKS = 20
_SELECTED = "cannot tell: only failed results are on record, so nobody knows which nodes had the check"
_CHECKS = """
SELECT "check", epoch_us(min(time)) AS since, count(*) AS results, count(*) FILTER (status = 2) AS failed
FROM health_results WHERE time IS NOT NULL GROUP BY "check" ORDER BY failed DESC, results DESC, "check" LIMIT {most}
"""
_NODES = """
SELECT DISTINCT cluster || '/' || node AS node, TIMESTAMP 'epoch' AS time FROM health_results WHERE "check" = {check}
"""
_FIRED = """
SELECT h.cluster || '/' || h.node AS node, h.time,
       coalesce(max(epoch_us(least(coalesce(i."end", i.start + INTERVAL 1 DAY), i.start + INTERVAL 28 DAY))
                    - epoch_us(i.start)), 0) / 3.6e9 AS out_hours
FROM health_results h LEFT JOIN node_intervals i
  ON i.cluster = h.cluster AND i.node = h.node AND i.kind IN ('drain', 'down', 'maintenance')
 AND i.start BETWEEN h.time - INTERVAL 1 MINUTE AND h.time + INTERVAL 10 MINUTE
WHERE h."check" = {check} AND h.status = 2 AND h.time IS NOT NULL
GROUP BY h.cluster, h.node, h.time ORDER BY node, h.time
"""
_CONFIRMED = """
SELECT cluster || '/' || node AS node, start AS time FROM node_intervals WHERE kind IN ('fault', 'down', 'failing')
UNION ALL SELECT e.cluster || '/' || trim(n.node) AS node, e.time FROM failure_events e,
    unnest(string_split(e.nodes, ',')) AS n(node) WHERE e.nodes <> '' AND e.time IS NOT NULL
"""
_GOOD_JOBS = """
WITH failed AS (SELECT DISTINCT "check", cluster, node, time FROM health_results WHERE status = 2 AND time IS NOT NULL)
SELECT f."check", count(DISTINCT a.attempt_id) AS hit FROM failed f JOIN attempt_nodes n USING (node)
JOIN attempts a ON a.attempt_id = n.attempt_id AND a.cluster = f.cluster AND f.time BETWEEN a.start AND a."end"
WHERE a.state = 'COMPLETED' GROUP BY f."check"
"""
_COMPLETED = "SELECT count(*) AS jobs FROM attempts WHERE state = 'COMPLETED'"


def checks_section(data: FleetData, known: NodeFaults) -> Section:
    """For each check: the nodes that have it against the others, before and after its first result; and its alarms."""
    title = "Effect of health checks"
    if not data.store.rows("health_results"):
        return Section("checks", title, ("no result of a health check is recorded",))
    node, day = node_events(known, data.rows(_CONFIRMED))
    confirmed = (node[node >= 0], day[node >= 0])
    effects, fired, hit = [], [], _jobs_hit(data)
    for row in data.rows(_CHECKS.format(most=_MOST_CHECKS)).to_pylist():
        text = "'" + row["check"].replace("'", "''") + "'"
        treated = np.unique(node_events(known, data.rows(_NODES.format(check=text)))[0])
        effect = _effect(known, row["check"], since=row["since"], treated=treated, events=confirmed)
        only_failed = row["failed"] == row["results"]
        effects.append(msgspec.structs.replace(effect, verdict=_SELECTED) if only_failed else effect)
        fired.append(_alarms(data, known, check=(row["check"], text), confirmed=confirmed, hit=hit))
    words = (
        "introduced: its first result; with: nodes that have results of it; without: all others; equal time before and "
        "after; events: faults, times down, failures pinned to a node",
        "an alarm is confirmed by such an event within 24 hours of it; a false one costs the time its node was taken "
        "out within ten minutes after it",
    )
    effect_shown = (
        ("check", "{check}"),
        ("introduced", "{introduced}"),
        ("with: before, after", "{treated_before:.2f}, {treated_after:.2f}"),
        ("without: before, after", "{compared_before:.2f}, {compared_after:.2f}"),
        ("ratio of changes [95 %]", "{ratio:.2f} [{low:.2f}, {high:.2f}]"),
        ("verdict", "{verdict}"),
    )
    alarm_shown = (
        ("check", "{check}"),
        ("alarms", "{fired:,}"),
        ("confirmed", "{confirmed:,}"),
        ("false", "{false_share:.1%}"),
        ("idle node-hours", "{idle_node_hours:,.1f}"),
        ("completed jobs that saw one", "{good_jobs_hit:.2%}"),
    )
    return Section(
        "checks",
        title,
        words,
        (
            sheet("check_effect", "Failures per 1000 node-days", rows=effects, shown=effect_shown),
            sheet("check_alarms", "Alarms and what false ones cost", rows=fired, shown=alarm_shown),
        ),
    )


def _effect(known: NodeFaults, check: str, *, since: int, treated: Any, events: tuple[Any, Any]) -> Any:
    day = (since - known.origin) / DAY_US
    span = max(0.0, min(day, known.last - day))
    with_it = np.zeros(known.nodes, bool)
    with_it[treated] = True
    before, after = (
        [_counts(events, group, low=low, high=low + span) for group in (with_it, ~with_it)] for low in (day - span, day)
    )
    when = datetime.fromtimestamp(since / 1e6, UTC).strftime("%Y-%m-%d")
    compared = (before[1], after[1]) if (~with_it).any() else None
    return effect_of(check, when, treated=(before[0], after[0]), compared=compared)


def _counts(events: tuple[Any, Any], group: Any, *, low: float, high: float) -> PeriodCounts:
    node, day = events
    inside = group[node] & (day >= low) & (day < high)
    counts = np.bincount(node[inside], minlength=len(group))[group]
    vmr = dispersion(counts).vmr if counts.sum() > 1 else 1.0
    return PeriodCounts(int(counts.sum()), float(group.sum() * (high - low)), max(vmr, 1.0) if vmr == vmr else 1.0)


def _jobs_hit(data: FleetData) -> dict[str, float]:
    """Of each check the share of completed jobs that saw it fail on one of their nodes."""
    jobs = data.rows(_COMPLETED)["jobs"].to_pylist()[0] or 1
    return {row["check"]: row["hit"] / jobs for row in data.rows(_GOOD_JOBS).to_pylist()}


def _alarms(
    data: FleetData, known: NodeFaults, *, check: tuple[str, str], confirmed: tuple[Any, Any], hit: dict[str, float]
) -> Any:
    rows = data.rows(_FIRED.format(check=check[1]))
    node, day = node_events(known, rows)
    hours, share = rows["out_hours"].to_numpy(), hit.get(check[0], 0.0)
    fired = (node, day)
    return alarms(check[0], fired, confirmed_at=confirmed, out_hours=hours, good_jobs_hit=share, window=1.0)
