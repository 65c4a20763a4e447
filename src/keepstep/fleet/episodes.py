"""Faults that belong together: merging into episodes, time down, what a fault says about the next 28 days. Pure.

A fault list is three arrays of equal length: `node` (small integers), `start` and `end` in days from one origin.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.rates_nodes import dispersion

__all__ = ["EpisodeEffect", "Faults", "Gaps", "again_within", "episode_effect", "merge", "start_gaps", "time_down"]


class Faults(msgspec.Struct, frozen=True):
    """Arrays sorted by node, then start: node number, start and end in days."""

    node: Any
    start: Any
    end: Any

    @staticmethod
    def of(node: Any, start: Any, *, end: Any) -> Faults:
        """The same faults in order."""
        number, begin, stop = np.asarray(node, np.int64), np.asarray(start, float), np.asarray(end, float)
        order = np.lexsort((stop, begin, number))
        return Faults(number[order], begin[order], stop[order])


def merge(faults: Faults, gap: float) -> Faults:
    """Episodes: a fault joins the one before it on its node if it starts at most `gap` days after all earlier ends."""
    if not len(faults.node):
        return faults
    # The running maximum of ends inside each node: nodes are moved apart by more than any time span.
    span = float(max(faults.end.max(), faults.start.max()) - min(faults.start.min(), faults.end.min())) + abs(gap) + 1.0
    rank = np.cumsum(np.append(0, np.diff(faults.node) != 0)) * span * 2.0
    reach = np.maximum.accumulate(faults.end + rank) - rank
    new = np.append(True, (np.diff(faults.node) != 0) | (faults.start[1:] - reach[:-1] > gap))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(new)) - 1
    return Faults(faults.node[first], faults.start[first], reach[last])


def time_down(faults: Faults) -> float:
    """Node-days in which a node had at least one fault."""
    union = merge(faults, 0.0)
    return float((union.end - union.start).sum())


class EpisodeEffect(msgspec.Struct, frozen=True):
    """What merging with `gap` days does: episodes, their rate per 1000 up-days, variance to mean per node."""

    gap: float
    episodes: int
    per_1000_up_days: float
    vmr: float


def episode_effect(faults: Faults, gap: float, *, nodes: int, horizon: float) -> EpisodeEffect:
    """Count episodes of `nodes` nodes over `horizon` days; exposure is the time not inside an episode."""
    merged = merge(faults, gap)
    exposure = nodes * horizon - float((merged.end - merged.start).sum())
    counts = np.bincount(merged.node, minlength=nodes)
    return EpisodeEffect(gap, len(merged.node), 1000.0 * len(merged.node) / exposure, dispersion(counts).vmr)


def again_within(faults: Faults, days: float, *, horizon: float) -> tuple[int, int]:
    """How many starts another followed on the node within `days`, of those judged (start + days inside the horizon)."""
    judged = faults.start <= horizon - days
    same = np.append(np.diff(faults.node) == 0, False)
    following = np.append(faults.start[1:] - faults.start[:-1], np.inf)
    return int((judged & same & (following <= days)).sum()), int(judged.sum())


class Gaps(msgspec.Struct, frozen=True):
    """Days from start to start on a node, and whether the second start was seen (else the end of observation)."""

    days: Any
    observed: Any


def start_gaps(faults: Faults, *, horizon: float, origin_nodes: int | None = None) -> Gaps:
    """Gaps between starts, the last one of each node censored at `horizon`.

    With `origin_nodes` day 0 is a further origin for that many nodes, touched or not.
    """
    node, start = faults.node, faults.start
    if origin_nodes is not None:
        node = np.concatenate([np.arange(origin_nodes), node])
        start = np.concatenate([np.zeros(origin_nodes), start])
        order = np.lexsort((start, node))
        node, start = node[order], start[order]
    follows = np.append(np.diff(node) == 0, False)
    days = np.where(follows, np.append(start[1:], 0.0) - start, horizon - start)
    return Gaps(days, follows)
