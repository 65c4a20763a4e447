"""Nodes that fail again and again: rules judged forward in time, on what nobody knew when the rule spoke. Pure.

A rule gives every node a score at a date from what was known by then; the outcome is whether the node has a failure in
the days that follow. Dates are days, matrices have one row a date and one column a node.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

__all__ = [
    "WINDOW_DAYS",
    "Difference",
    "NodeEvents",
    "Verdict",
    "at_equal_flags",
    "counts_before",
    "days_before",
    "decayed_before",
    "judge_dates",
    "judge_rule",
    "outcomes_after",
    "told_apart",
    "tuned_decay",
]

WINDOW_DAYS = 28.0
"""Days a rule looks back, and days its word is judged by (Meta, HPCA 2025: 28)."""
_DECAYS = (3.0, 7.0, 14.0, 28.0, 56.0)


class NodeEvents(msgspec.Struct, frozen=True):
    """Arrays: node number and day of each event; `nodes` is how many nodes there are."""

    node: Any
    day: Any
    nodes: int


def days_before(node: Any, spans: tuple[Any, Any], *, dates: Any, nodes: int) -> Any:
    """Days that spans (start, end in days) of each node cover in the 28 days before each date."""
    start, end = spans
    matrix = np.zeros((len(dates), nodes))
    for row, date in enumerate(dates):
        inside = np.clip(end, date - WINDOW_DAYS, date) - np.clip(start, date - WINDOW_DAYS, date)
        matrix[row] = np.bincount(node, weights=inside, minlength=nodes)
    return matrix


class Verdict(msgspec.Struct, frozen=True):
    """How a rule did over all dates. `low` and `high` bound the precision (bootstrap over nodes).

    `lift` is precision over the base rate, `recall` the share of failing node-dates that were flagged, `idle_node_days`
    the cost of taking flagged nodes out until the next date although nothing would have happened.
    """

    rule: str
    node_dates: int
    failing: int
    base_rate: float
    flagged: int
    hits: int
    precision: float
    low: float
    high: float
    recall: float
    lift: float
    idle_node_days: float


def judge_dates(horizon: float, *, window: float = WINDOW_DAYS) -> Any:
    """Dates `window` apart whose past and future windows both lie inside the horizon, the last day of which is open."""
    return np.arange(window, horizon - window + 1e-9, window)


def counts_before(events: NodeEvents, dates: Any, *, window: float = WINDOW_DAYS) -> Any:
    """Events of each node in (t - window, t] for every date t."""
    return _counted(events, dates, low=-window, high=0.0)


def outcomes_after(events: NodeEvents, dates: Any, *, window: float = WINDOW_DAYS) -> Any:
    """Whether each node has an event in (t, t + window]."""
    return _counted(events, dates, low=0.0, high=window) > 0


def _counted(events: NodeEvents, dates: Any, *, low: float, high: float) -> Any:
    matrix = np.zeros((len(dates), events.nodes), np.int64)
    for row, date in enumerate(dates):
        inside = (events.day > date + low) & (events.day <= date + high)
        matrix[row] = np.bincount(events.node[inside], minlength=events.nodes)
    return matrix


def decayed_before(events: NodeEvents, dates: Any, *, decay: float) -> Any:
    """Sum over past events of exp(-age/decay): bursts count, and are forgotten (the excitation of Hawkes 1971)."""
    matrix = np.zeros((len(dates), events.nodes))
    for row, date in enumerate(dates):
        past = (events.day <= date) & (events.day > date - 12 * decay)
        weights = np.exp((events.day[past] - date) / decay)
        matrix[row] = np.bincount(events.node[past], weights=weights, minlength=events.nodes)
    return matrix


def at_equal_flags(scores: Any, flags: Any) -> Any:
    """Flag, at each date, as many nodes as `flags` does: those with the highest scores (ties: the lower number)."""
    chosen = np.zeros(flags.shape, bool)
    for row in range(len(flags)):
        count = int(flags[row].sum())
        chosen[row, np.argsort(-scores[row], kind="stable")[:count]] = True
    return chosen & (scores > -np.inf)


def tuned_decay(events: NodeEvents, dates: Any, *, flags: Any, window: float = WINDOW_DAYS) -> Any:
    """Scores by decayed counts whose decay is chosen anew at each date, by hits at dates whose outcome was known.

    Nothing after a date enters its scores. Before there is a past to judge on, the window itself is the decay.
    """
    outcome = outcomes_after(events, dates, window=window)
    all_scores = [decayed_before(events, dates, decay=decay) for decay in _DECAYS]
    hits = np.array([(at_equal_flags(scores, flags) & outcome).sum(axis=1) for scores in all_scores])
    matrix = np.empty(flags.shape)
    for row, date in enumerate(dates):
        known = np.asarray(dates) + window <= date
        best = int(hits[:, known].sum(axis=1).argmax()) if known.any() else _DECAYS.index(WINDOW_DAYS)
        matrix[row] = all_scores[best][row]
    return matrix


def judge_rule(
    rule: str, flags: Any, *, outcome: Any, rng: np.random.Generator, days_out: float = WINDOW_DAYS
) -> Verdict:
    """Judge flags against outcomes of the same shape; a flagged node is out for `days_out` days."""
    flagged, hits, failing = int(flags.sum()), int((flags & outcome).sum()), int(outcome.sum())
    base = failing / outcome.size if outcome.size else float("nan")
    precision = hits / flagged if flagged else float("nan")
    low, high = _bootstrap((flags & outcome).sum(axis=0), flags.sum(axis=0), rng=rng)
    return Verdict(
        rule=rule,
        node_dates=outcome.size,
        failing=failing,
        base_rate=base,
        flagged=flagged,
        hits=hits,
        precision=precision,
        low=low,
        high=high,
        recall=hits / failing if failing else float("nan"),
        lift=precision / base if base else float("nan"),
        idle_node_days=(flagged - hits) * days_out,
    )


_ROUNDS = 1000


def _bootstrap(above: Any, below: Any, *, rng: np.random.Generator) -> tuple[float, float]:
    """Percentile interval of sum(above)/sum(below) when nodes are drawn again."""
    drawn = rng.multinomial(len(below), np.full(len(below), 1.0 / len(below)), size=_ROUNDS)
    sums = drawn @ below
    ratios = (drawn @ above)[sums > 0] / sums[sums > 0]
    if not len(ratios):
        return float("nan"), float("nan")
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


class Difference(msgspec.Struct, frozen=True):
    """Precision of `rule` minus that of `against` at equal flags, its 95 % interval over nodes, and the verdict."""

    rule: str
    against: str
    difference: float
    low: float
    high: float
    verdict: str


def told_apart(
    rule: tuple[str, Any], against: tuple[str, Any], *, outcome: Any, rng: np.random.Generator
) -> Difference:
    """Whether one rule (name, flags) is better than another that flags as many: a paired bootstrap over nodes."""
    (name, flags), (other, others) = rule, against
    gained = (flags & outcome).sum(axis=0).astype(float) - (others & outcome).sum(axis=0)
    count = max(int(others.sum()), 1)
    drawn = rng.multinomial(len(gained), np.full(len(gained), 1.0 / len(gained)), size=_ROUNDS)
    low, high = np.quantile(drawn @ gained / count, [0.025, 0.975])
    verdict = "not told apart" if low <= 0.0 <= high else "better" if low > 0 else "worse"
    return Difference(name, other, float(gained.sum()) / count, float(low), float(high), verdict)
