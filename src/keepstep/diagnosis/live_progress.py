"""The members' own word on where they stand, in the neutral form that the wavefront takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from keepstep.diagnosis.live_state import Seen, Watch
from keepstep.records.evidence import GroupProgress, Position, Signature, Transfer
from keepstep.records.finding import Finding, Suspect
from keepstep.records.operations import element_name, operation_name
from keepstep.records.summary import GroupMark, MemberProgress, StalledPeer

__all__ = ["fresh", "group_progress", "hear", "odd_one", "slow_pairs", "transfers"]

_SAME_COUNT = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
_BUSY_SHARE = 0.05
_STALE_S = 2.5
_STUCK_US = 300_000


def hear(seen: Seen, progress: MemberProgress, *, now: float) -> None:
    """Note one member's progress, and since when it has used no CPU, kept its stacks and moved nothing."""
    host, before = progress.host, seen.progress
    if before is not None and before.generation == progress.generation:
        elapsed = (progress.mono_ns - before.mono_ns) / 1e3
        if elapsed > 0 and host.cpu_us - before.host.cpu_us > _BUSY_SHARE * elapsed:
            seen.busy_at = now
    if host.stack and host.stack != seen.stack:
        seen.stack, seen.stack_at = host.stack, now
    seen.moved = now - progress.idle_us / 1e6
    seen.waits = _pressing(before, progress)
    seen.progress, seen.told = progress, now


def _pressing(before: MemberProgress | None, progress: MemberProgress) -> dict[int, StalledPeer]:
    """The peers of the calls under way, by rank; where bytes moved since the last word, the entry says so."""
    earlier = {
        (mark.hash, mark.sequence, peer.peer): peer for mark in (before.groups if before else ()) for peer in mark.peers
    }
    found: dict[int, StalledPeer] = {}
    for mark in progress.groups:
        for peer in mark.peers:
            old = earlier.get((mark.hash, mark.sequence, peer.peer))
            moved = old is not None and (old.bytes_sent, old.bytes_received) != (peer.bytes_sent, peer.bytes_received)
            found[-1 - peer.peer if moved else peer.peer] = peer
    return found


def fresh(watch: Watch, now: float) -> dict[int, MemberProgress]:
    """The progress of each rank that was told after the job had stopped to advance, and not long ago."""
    return {
        rank: seen.progress
        for rank, seen in watch.seen.items()
        if seen.progress is not None
        and rank not in watch.retired
        and seen.told > max(watch.advanced + 0.2, now - _STALE_S)
        and seen.progress.generation == watch.generation
    }


def group_progress(watch: Watch, known: Mapping[int, MemberProgress]) -> list[GroupProgress]:
    """How far every group is, by the ranks in `known`; members that said nothing are listed without a position."""
    positions: dict[tuple[int, int], list[Position]] = {}
    for rank, progress in known.items():
        told = watch.seen[rank].told
        for mark in progress.groups:
            if mark.lane == 0:
                positions.setdefault((mark.hash, mark.size), []).append(_position(rank, mark, told=told))
    names = {entry.hash: entry.name for profile in watch.profiles.values() for entry in profile.groups}
    return [
        GroupProgress(
            group=names.get(key, f"{key:08x}"),
            ranks=_members(watch, key, size=size, heard=(position.rank for position in found)),
            positions=tuple(found),
        )
        for (key, size), found in positions.items()
    ]


def _members(watch: Watch, key: int, *, size: int, heard: Iterable[int]) -> tuple[int, ...]:
    """The ranks of a group: all that ever spoke of it, which is everybody where the world has its size."""
    if size == watch.plan.world:
        return tuple(range(size))
    return tuple(sorted({*heard, *watch.groups.get((key, 0), {}).values()}))


def _position(rank: int, mark: GroupMark, *, told: float) -> Position:
    signature = {}
    if mark.op:
        name = operation_name(mark.op)
        count = mark.count if name in _SAME_COUNT else None
        signature[mark.sequence + 1] = Signature(op=name, dtype=element_name(mark.element), count=count)
    return Position(
        rank=rank,
        queued=mark.queued,
        started=mark.started,
        finished=mark.finished,
        signatures=signature,
        waiting_since=told - mark.open_us / 1e6 if mark.open_us else None,
    )


def transfers(watch: Watch, known: Mapping[int, MemberProgress]) -> list[Transfer]:
    """The messages under way whose other end is known."""
    return [
        Transfer(
            rank=rank,
            source=rank if transfer.send else transfer.peer,
            destination=transfer.peer if transfer.send else rank,
            group=f"{transfer.hash:08x}",
            queued=watch.seen[rank].told - transfer.open_us / 1e6,
        )
        for rank, progress in known.items()
        for transfer in progress.transfers
        if 0 <= transfer.peer < watch.plan.world
    ]


def slow_pairs(watch: Watch) -> tuple[list[tuple[int, int]], bool]:
    """(directed pairs whose sender holds bytes back that the receiver waits for, whether bytes still move anywhere)."""
    stuck, moving = [], False
    for rank, seen in watch.seen.items():
        for peer, wait in seen.waits.items():
            if peer < 0:
                moving = True
                continue
            other = watch.seen.get(peer)
            back = other.waits.get(rank) if other else None
            held = wait.wait_credit_us + wait.wire_us
            if held > _STUCK_US and back is not None and back.wait_peer_us > _STUCK_US:
                stuck.append((rank, peer))
    return sorted(stuck), moving


def odd_one(watch: Watch, finding: Finding, *, known: Mapping[int, MemberProgress]) -> Finding:
    """A mismatch in which the members' own past decides: those who never before called what they call now.

    Unchanged where that is everybody, nobody, or not known.
    """
    names = {entry.hash: entry.name for profile in watch.profiles.values() for entry in profile.groups}
    ranks = {one.rank for group in finding.suspects for one in group if one.rank is not None}
    marks = {
        rank: mark
        for rank in ranks & known.keys()
        for mark in known[rank].groups
        if mark.lane == 0 and mark.op and finding.group in (names.get(mark.hash), f"{mark.hash:08x}")
    }
    odd = sorted(rank for rank, mark in marks.items() if not mark.before)
    if len(finding.suspects) != 1 or not odd or len(odd) == len(marks):
        return finding
    return msgspec.structs.replace(
        finding,
        suspects=tuple((Suspect(rank=rank),) for rank in odd),
        victims=tuple(sorted({*finding.victims, *ranks} - set(odd))),
        confidence=max(finding.confidence, 0.9),
        evidence=(
            *finding.evidence,
            f"rank {', '.join(map(str, odd))} never called that in this group before, the other side did",
        ),
    )
