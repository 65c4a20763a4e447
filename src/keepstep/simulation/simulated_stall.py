"""What the members of a job say when it stands still: who waits in which group, by the order of calls in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepstep.records.ring import SpanKind
from keepstep.records.summary import (
    GroupMark,
    HostSample,
    MemberProgress,
    OpenTransfer,
    StalledPeer,
    WatchReport,
)
from keepstep.simulation.simulated_layout import Layout, Numbers
from keepstep.simulation.simulated_records import CALLS

__all__ = ["Stall", "stall_reports"]

_OPS = {"tp": 1, "pp": 10, "dp": 5, "ep": 6}
_BYTES = 1 << 20
_WITHIN = ("cut-link", "wrong-op", "wrong-shape", "freeze-inside", "swallowed")


@dataclass(frozen=True)
class Stall:
    """Why nothing moves from `step` on.

    `kind`: freeze, gone (a zombie), dead-lock, busy, stop-data, saving, between-steps, compiling (`rank` does not come
    to its first collective of the step); freeze-inside (it came, and moves no byte); cut-link (`rank` to `peer`,
    neighbours in a group); swallowed (as cut-link, and `rank` has finished: its last bytes left it); wrong-op,
    wrong-shape (`rank` calls something else in its first collective); silent (as dead-lock, and the agent says nothing
    of `rank`).
    `ranks` are further origins of the same kind.
    """

    kind: str
    step: int
    rank: int
    peer: int = -1
    ranks: tuple[int, ...] = ()

    @property
    def origins(self) -> tuple[int, ...]:
        """All ranks that do not come."""
        return (self.rank, *self.ranks)


@dataclass(frozen=True)
class _Reach:
    """`entered[kind]` and `passed[kind]`: which ranks have called, and got through, the calls of a kind."""

    entered: dict[str, Numbers]
    passed: dict[str, Numbers]


def stall_reports(
    layout: Layout, stall: Stall, *, since_ns: int, now_ns: int, generation: int = 1
) -> tuple[WatchReport, ...]:
    """What every agent says at `now_ns` of a job that has stood still since `since_ns`."""
    reach = _reach(layout, stall)
    age_us = (now_ns - since_ns) // 1000
    members = [
        _member(layout, stall, rank=rank, reach=reach, age_us=age_us, when=(now_ns, generation))
        for rank in range(layout.world)
        if stall.kind != "silent" or rank not in stall.origins
    ]
    by_node: dict[str, list[MemberProgress]] = {}
    for progress in members:
        by_node.setdefault(layout.node(progress.rank), []).append(progress)
    return tuple(
        WatchReport(node=node, wall=now_ns / 1e9, mono_ns=now_ns, progress=tuple(mine))
        for node, mine in by_node.items()
    )


def _broken_group(layout: Layout, stall: Stall) -> tuple[str, int]:
    """The first group of both ends of a cut link, or of the one who calls something else."""
    for kind in layout.kinds():
        number, _ = layout.places(kind)
        if stall.peer < 0 or (
            number[stall.rank] == number[stall.peer] and stall.peer in layout.neighbours(kind)[stall.rank]
        ):
            return kind, int(number[stall.rank])
    return "", -1


def _reach(layout: Layout, stall: Stall) -> _Reach:
    here = np.ones(layout.world, bool)
    breaks = stall.kind in _WITHIN
    if not breaks:
        here[list(stall.origins)] = False
    broken = _broken_group(layout, stall) if breaks else ("", -1)
    entered, passed = {}, {}
    for kind in layout.kinds():
        rows = layout.groups(kind)
        number, _ = layout.places(kind)
        entered[kind] = here.copy()
        through = here[rows].all(axis=1)
        if kind == broken[0]:
            through[broken[1]] = False
        here = here & through[number]
        if kind == broken[0] and stall.kind == "swallowed":
            here[stall.rank] = True
        passed[kind] = here.copy()
    return _Reach(entered, passed)


def _member(
    layout: Layout, stall: Stall, *, rank: int, reach: _Reach, age_us: int, when: tuple[int, int]
) -> MemberProgress:
    origin = rank in stall.origins and stall.kind not in _WITHIN
    marks, transfers = [], []
    for kind in layout.kinds():
        number, place = layout.places(kind)
        waits = bool(reach.entered[kind][rank] and not reach.passed[kind][rank])
        base = stall.step * CALLS
        done = base + (CALLS if reach.passed[kind][rank] else 0)
        group = int(layout.group_hash(kind, int(number[rank])))
        size = layout.groups(kind).shape[1]
        if kind == "pp":
            transfers += _messages(layout, rank, group=group, base=base, age_us=age_us, reach=reach) if waits else []
            continue
        op, count = _call(stall, rank, op=_OPS[kind])
        peers = _peers(layout, stall, rank=rank, kind=kind, age_us=age_us) if waits else ()
        marks.append(GroupMark(
            group, 0, size, int(place[rank]), done + waits, done + waits, done, op, 10, count, 0,
            done if waits else done - 1, age_us if waits else 0, 0 if (op, count) != (_OPS[kind], 1000) else 40, peers,
        ))  # fmt: skip
    return MemberProgress(
        rank, when[1], stall.step, when[0], *_span(stall, origin, age_us=age_us), 0,
        _host(stall, rank, origin=origin, age_us=age_us), tuple(marks), tuple(transfers),
    )  # fmt: skip


def _call(stall: Stall, rank: int, *, op: int) -> tuple[int, int]:
    if rank == stall.rank and stall.kind == "wrong-op":
        return op + 1, 1000
    return op, 999 if rank == stall.rank and stall.kind == "wrong-shape" else 1000


def _messages(layout: Layout, rank: int, *, group: int, base: int, age_us: int, reach: _Reach) -> list[OpenTransfer]:
    """A rank exchanges with each neighbour in its pipeline; those that are not there keep it waiting."""
    near = [int(peer) for peer in layout.neighbours("pp")[rank] if peer >= 0]
    absent = [peer for peer in near if not reach.entered["pp"][peer]] or [
        peer for peer in near if not reach.passed["pp"][peer]
    ]
    return [OpenTransfer(group, False, peer, base, age_us) for peer in absent[:1]]


def _peers(layout: Layout, stall: Stall, *, rank: int, kind: str, age_us: int) -> tuple[StalledPeer, ...]:
    found = []
    for peer in layout.neighbours(kind)[rank].tolist():
        if peer >= 0:
            cut = stall.kind == "cut-link" and (rank, peer) == (stall.rank, stall.peer)
            found.append(StalledPeer(peer, 0 if cut else _BYTES, 0, 0, 0, age_us if cut else 50, age_us))
    return tuple(found)


def _span(stall: Stall, origin: bool, *, age_us: int) -> tuple[int, int, int]:
    """(open span, its age, time since anything began or ended)."""
    if not origin:
        return SpanKind.STEP, age_us + 100_000, age_us
    kinds = {"stop-data": SpanKind.DATA, "saving": SpanKind.CHECKPOINT, "between-steps": 0, "compiling": SpanKind.SETUP}
    return int(kinds.get(stall.kind, SpanKind.STEP)), age_us, age_us


def _host(stall: Stall, rank: int, *, origin: bool, age_us: int) -> HostSample:
    busy = origin and stall.kind in ("busy", "compiling")
    state = "S"
    if rank in stall.origins:
        state = "Z" if stall.kind == "gone" else "T" if stall.kind.startswith("freeze") else "S"
    return HostSample(10**6 + (age_us // 2 if busy else 0), 0, state, 1000 + rank if origin else 7)
