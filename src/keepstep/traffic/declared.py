"""The demand of a job that says how it is laid out: sizes of its parallel dimensions, and what each group sends."""

from __future__ import annotations

import math
from collections import Counter

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, DeclaredCollective, Demand, JobLayout, Seat

__all__ = ["demand_of", "groups_of"]

_MOST_RANKS = 1_000_000
"""A job may have."""
_MOST_BYTES = 1e30
"""A collective may send in a step; beyond it times and gains are no numbers any more."""
_ROUNDING = 1e-6


def groups_of(layout: JobLayout) -> dict[str, list[tuple[int, ...]]]:
    """The ranks of every group by kind. Raises TrafficError for sizes that do not multiply to the number of ranks, and
    for more ranks than can be."""
    world = len(layout.hosts) * layout.ranks_per_host
    tp, pp, ep = layout.tp, layout.pp, layout.ep
    if min(tp, pp, ep) < 1 or world < 1:
        raise TrafficError(f"job {layout.job!r} needs at least one rank and sizes of at least 1")
    if world > _MOST_RANKS:
        raise TrafficError(f"job {layout.job!r} has {world} ranks, more than {_MOST_RANKS}")
    dp = layout.dp or world // (tp * pp)
    if tp * pp * dp != world:
        raise TrafficError(f"job {layout.job!r}: tp {tp} x pp {pp} x dp {dp} is {tp * pp * dp}, not {world} ranks")
    if dp % ep:
        raise TrafficError(f"job {layout.job!r}: ep {ep} does not divide dp {dp}")
    replicas = [tuple(range(first, first + tp * dp, tp)) for stage in range(pp) for first in _firsts(stage, tp, dp=dp)]
    return {
        "tp": [tuple(range(first, first + tp)) for first in range(0, world, tp)],
        "dp": replicas,
        "ep": [group[start : start + ep] for group in replicas for start in range(0, dp, ep)],
        "pp": [tuple(range(first, world, tp * dp)) for first in range(tp * dp)],
        "world": [tuple(range(world))],
    }


def demand_of(layout: JobLayout) -> Demand:
    """The demand of a declared layout. Raises TrafficError as `groups_of`, and for sizes or times that are none."""
    if len(set(layout.hosts)) != len(layout.hosts):
        host = Counter(layout.hosts).most_common(1)[0][0]
        raise TrafficError(f"job {layout.job!r} lists host {host!r} twice")
    if not (math.isfinite(layout.step_s) and layout.step_s >= 0):
        raise TrafficError(f"job {layout.job!r} has steps of {layout.step_s:g} s")
    groups = groups_of(layout)
    slots = layout.ranks_per_host
    seats = tuple(
        Seat(rank, layout.hosts[rank // slots], rank % slots, slots) for rank in range(len(groups["world"][0]))
    )
    uses: list[CollectiveUse] = []
    for number, declared in enumerate(layout.collectives):
        _check(declared, layout, number=number)
        named = [(place, ranks) for place, ranks in enumerate(groups[declared.group]) if len(ranks) > 1]
        for place, ranks in named or [(0, groups[declared.group][0])]:
            uses.append(_use(declared, f"{declared.group}{place}.{declared.operation}.{number}", ranks=ranks))
    return Demand(layout.job, seats, tuple(uses), layout.step_s, layout.priority, layout.known)


def _check(declared: DeclaredCollective, layout: JobLayout, *, number: int) -> None:
    """Raises TrafficError for sizes and times that are none."""
    sizes = (declared.nbytes, declared.calls, declared.start_s, declared.end_s)
    wrong = ""
    if not all(math.isfinite(size) and size >= 0 for size in sizes) or declared.end_s < declared.start_s:
        wrong = "bytes, calls and times must be finite and not negative"
    elif declared.nbytes * declared.calls > _MOST_BYTES:
        wrong = f"more than {_MOST_BYTES:g} bytes a step"
    elif 0 < layout.step_s < declared.end_s * (1 - _ROUNDING):
        wrong = f"it ends at {declared.end_s:g} s, the step at {layout.step_s:g} s"
    if wrong:
        raise TrafficError(f"job {layout.job!r}, collective {number + 1}: {wrong}")


def _firsts(stage: int, tp: int, *, dp: int) -> range:
    return range(stage * tp * dp, stage * tp * dp + tp)


def _use(declared: DeclaredCollective, name: str, *, ranks: tuple[int, ...]) -> CollectiveUse:
    if declared.operation == "send":
        line = ranks[::-1] if declared.back else ranks
        ranks = tuple(rank for pair in zip(line, line[1:], strict=False) for rank in pair)
    return CollectiveUse(
        name,
        declared.operation,
        ranks,
        declared.nbytes,
        declared.calls,
        declared.start_s,
        declared.end_s,
        declared.algorithm,
        declared.data_dependent,
    )
