"""The demand of a job that ran: what the recorder saw each rank send to each peer, when in the step, and its waits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from keepstep.errors import TrafficError
from keepstep.records.demand import Collective, CollectiveUse, Demand, Seat
from keepstep.records.ring import OpSlot, Ring, SlotStatus

__all__ = ["MeasuredUse", "Observed", "observe", "whole_steps"]

_OPERATIONS: dict[int, Collective] = {
    1: "all_reduce",
    2: "reduce",
    3: "broadcast",
    4: "all_gather",
    5: "reduce_scatter",
    6: "all_to_all",
    10: "send",
}
_IRREGULAR = 0.10
"""An all_to_all whose bytes change by more than this from step to step depends on the data."""
_NS = 1e-9


class MeasuredUse(msgspec.Struct, frozen=True):
    """What one collective took, in s per step, mean over its ranks: all of it, time on the wire, waits for the peer."""

    use: str
    total_s: float
    wire_s: float
    wait_s: float


class Observed(msgspec.Struct, frozen=True):
    """The demand seen in `steps` whole steps, and what its collectives took."""

    demand: Demand
    measured: tuple[MeasuredUse, ...]
    steps: int


def observe(job: str, rings: Mapping[int, Ring], *, seats: Sequence[Seat]) -> Observed:
    """The demand of `job` from its recorder `rings` by rank.

    Only steps that every rank has recorded whole are counted, not the first (set-up). Raises TrafficError if there are
    none, or a rank with records has no seat.
    """
    seated = {seat.rank for seat in seats}
    for rank in sorted(rings):
        if rank not in seated:
            raise TrafficError(f"the records of job {job!r} are of rank {rank}, which has no seat")
    steps = whole_steps(rings)
    if not steps:
        raise TrafficError(f"no step of job {job!r} is whole in the records of all {len(rings)} ranks")
    begin = {rank: _begins(ring, steps) for rank, ring in rings.items()}
    found: dict[tuple[str, Collective], list[tuple[int, OpSlot]]] = {}
    for rank, ring in rings.items():
        for op in ring.operations:
            kind = _OPERATIONS.get(op.op)
            if kind is not None and op.step in steps and op.status is SlotStatus.DONE:
                found.setdefault((ring.group_name(op.group_hash) or f"{op.group_hash:08x}", kind), []).append(
                    (rank, op)
                )
    uses = tuple(_use(group, kind, ops=ops, begin=begin, steps=steps) for (group, kind), ops in found.items())
    measured = tuple(_measured(use.name, ops, steps=steps) for use, ops in zip(uses, found.values(), strict=True))
    return Observed(Demand(job, tuple(seats), uses, _step_s(begin)), measured, len(steps))


def whole_steps(rings: Mapping[int, Ring]) -> frozenset[int]:
    """Steps that all ranks have, but the first and the last of any rank, which may be cut off."""
    common: set[int] | None = None
    for ring in rings.values():
        mine = sorted({op.step for op in ring.operations if op.step >= 0})
        whole = set(mine[1:-1])
        common = whole if common is None else common & whole
    return frozenset(common or ())


def _begins(ring: Ring, steps: frozenset[int]) -> dict[int, int]:
    """When the first operation of each step was queued, ns of the rank's own clock."""
    begin: dict[int, int] = {}
    for op in ring.operations:
        if op.step in steps:
            begin[op.step] = min(begin.get(op.step, op.queued_ns), op.queued_ns)
    return begin


def _use(
    group: str,
    kind: Collective,
    *,
    ops: Sequence[tuple[int, OpSlot]],
    begin: Mapping[int, Mapping[int, int]],
    steps: frozenset[int],
) -> CollectiveUse:
    pairs: dict[tuple[int, int], float] = {}
    by_step: dict[int, float] = dict.fromkeys(steps, 0.0)
    ranks: set[int] = set()
    for rank, op in ops:
        ranks.add(rank)
        for peer in op.peers:
            if peer.peer >= 0 and peer.bytes_sent:
                ranks.add(peer.peer)
                key = (rank, peer.peer)
                pairs[key] = pairs.get(key, 0.0) + peer.bytes_sent / len(steps)
                by_step[op.step] += peer.bytes_sent
    mean = statistics.fmean(by_step.values())
    irregular = kind == "all_to_all" and mean > 0 and statistics.pstdev(by_step.values()) / mean > _IRREGULAR
    senders = {rank for rank, _ in ops}
    return CollectiveUse(
        f"{group}.{kind}",
        kind,
        tuple(sorted(ranks)),
        statistics.fmean(op.nbytes for _, op in ops),
        len(ops) / len(senders) / len(steps),
        statistics.median((op.started_ns - begin[rank][op.step]) * _NS for rank, op in _firsts(ops)),
        statistics.median((op.finished_ns - begin[rank][op.step]) * _NS for rank, op in _firsts(ops[::-1])),
        data_dependent=irregular,
        measured_bytes=tuple((a, b, nbytes) for (a, b), nbytes in sorted(pairs.items())),
    )


def _firsts(ops: Sequence[tuple[int, OpSlot]]) -> list[tuple[int, OpSlot]]:
    """The first operation of every rank and step, in the order given."""
    return list({(rank, op.step): (rank, op) for rank, op in reversed(ops)}.values())


def _measured(name: str, ops: Sequence[tuple[int, OpSlot]], *, steps: frozenset[int]) -> MeasuredUse:
    share = _NS / len(steps) / len({rank for rank, _ in ops})
    total = sum(op.finished_ns - op.started_ns for _, op in ops)
    wire = sum(max((peer.wire_ns for peer in op.peers), default=0) for _, op in ops)
    wait = sum(max((peer.wait_peer_ns + peer.wait_credit_ns for peer in op.peers), default=0) for _, op in ops)
    return MeasuredUse(name, total * share, wire * share, wait * share)


def _step_s(begin: Mapping[int, Mapping[int, int]]) -> float:
    """Median time from the begin of a step to the next one's; 0.0 with a single step."""
    times = []
    for begins in begin.values():
        steps = sorted(begins)
        times += [(begins[b] - begins[a]) * _NS for a, b in zip(steps, steps[1:], strict=False) if b == a + 1]
    return statistics.median(times) if times else 0.0
