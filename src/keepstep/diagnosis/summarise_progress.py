"""Where a member stands when no step of it ends: the open span, and the newest call of every group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from keepstep.diagnosis.summarise_slots import FIRST_POINT_TO_POINT, Slots, Table
from keepstep.records.ring import RingHeader
from keepstep.records.summary import GroupMark, HostSample, MemberProgress, OpenTransfer, StalledPeer

__all__ = ["progress_of_slots"]

_MOST_PEERS = 8
_MOST_TRANSFERS = 8
_SEND = 10
_RUNNING = 1


def progress_of_slots(header: RingHeader, slots: Slots, *, host: HostSample, now_ns: int) -> MemberProgress:
    """The member's progress at `now_ns`, by what the ring holds since its last whole step."""
    span, began = _innermost(slots.spans)
    moments = [
        int(table[name].max())
        for table, names in ((slots.operations, ("started_ns", "finished_ns")), (slots.spans, ("began_ns", "ended_ns")))
        for name in names
        if len(table)
    ]
    beat = header.heartbeat_ns
    return MemberProgress(
        rank=header.rank,
        generation=header.generation,
        step=header.step,
        mono_ns=now_ns,
        span=span,
        span_us=_age_us(began, now_ns),
        idle_us=_age_us(max(moments, default=0), now_ns),
        heartbeat_us=_age_us(beat, now_ns),
        host=host,
        groups=tuple(_marks(header, slots, now_ns=now_ns)),
        transfers=tuple(_transfers(slots.operations, now_ns)),
    )


def _age_us(moment_ns: int, now_ns: int) -> int:
    return max(0, now_ns - moment_ns) // 1000 if moment_ns else 0


def _innermost(spans: Table) -> tuple[int, int]:
    """(kind, begin in ns) of the open span that began last; (0, end of the last one) between spans."""
    is_open = spans[spans["ended_ns"] == 0]
    if len(is_open):
        last = is_open[int(np.argmax(is_open["began_ns"]))]
        return int(last["op"]), int(last["began_ns"])
    return 0, int(spans["ended_ns"].max()) if len(spans) else 0


def _marks(header: RingHeader, slots: Slots, *, now_ns: int) -> Iterator[GroupMark]:
    calls = slots.operations[slots.operations["generation"] == header.generation]
    for group in header.groups:
        if group.generation != header.generation or not group.queued:
            continue
        place = (group.hash, group.lane, group.size, group.group_rank, group.queued, group.started, group.finished)
        mine = calls[(calls["group_hash"] == group.hash) & ((calls["op"] >= FIRST_POINT_TO_POINT) == bool(group.lane))]
        if not len(mine):
            yield GroupMark(*place)
            continue
        if group.lane:
            waiting = mine[mine["finished_ns"] == 0]
            yield GroupMark(*place, peers=_merged(one for call in waiting for one in _stalled(slots.peers, call)))
            continue
        call = mine[-1]
        running = not call["finished_ns"]
        yield GroupMark(
            *place,
            op=int(call["op"]),
            element=int(call["element"]),
            count=int(call["count"]),
            root=int(call["root"]),
            sequence=int(call["sequence"]),
            open_us=_age_us(int(call["started_ns"]), now_ns) if running else 0,
            before=_before(mine),
            peers=tuple(_stalled(slots.peers, call)) if running else (),
        )


def _before(calls: Table) -> int:
    """How many of the earlier calls are the same as the last one."""
    same = np.ones(len(calls) - 1, bool)
    for name in ("op", "element", "count", "root"):
        same &= calls[name][:-1] == calls[name][-1]
    return int(np.count_nonzero(same))


def _stalled(peers: Table, call: np.void) -> Iterator[StalledPeer]:
    mine = peers[(peers["op_index"] + 1 == call["mark"]) & (peers["peer"] >= 0)]
    for row in mine[:_MOST_PEERS]:
        waits = (int(row[name]) // 1000 for name in ("wait_own_ns", "wait_credit_ns", "wire_ns", "wait_peer_ns"))
        yield StalledPeer(int(row["peer"]), int(row["bytes_sent"]), int(row["bytes_received"]), *waits)


def _merged(stalled: Iterable[StalledPeer]) -> tuple[StalledPeer, ...]:
    """Messages with one peer together, both ways: the sums of their bytes, the longest of their waits."""
    found: dict[int, StalledPeer] = {}
    for one in stalled:
        before = found.get(one.peer, StalledPeer(one.peer, 0, 0, 0, 0, 0, 0))
        found[one.peer] = StalledPeer(
            one.peer,
            before.bytes_sent + one.bytes_sent,
            before.bytes_received + one.bytes_received,
            max(before.wait_own_us, one.wait_own_us),
            max(before.wait_credit_us, one.wait_credit_us),
            max(before.wire_us, one.wire_us),
            max(before.wait_peer_us, one.wait_peer_us),
        )
    return tuple(found.values())[:_MOST_PEERS]


def _transfers(calls: Table, now_ns: int) -> Iterator[OpenTransfer]:
    waiting = calls[(calls["op"] >= FIRST_POINT_TO_POINT) & (calls["status"] == _RUNNING) & (calls["finished_ns"] == 0)]
    for call in waiting[:_MOST_TRANSFERS]:
        age = _age_us(int(call["started_ns"]), now_ns)
        yield OpenTransfer(
            int(call["group_hash"]), int(call["op"]) == _SEND, int(call["root"]), int(call["sequence"]), age
        )
