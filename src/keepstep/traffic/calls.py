"""Which links hold a collective up? By what members tell of the calls they are in, twice a second while no step ends.

A dead link carries nothing, and soon nothing passes in the whole call. While bytes pass anywhere in it, a slow link
holds it up, and that is no reason to cut it. Who has not begun the call yet is waited for by all, over sound links.
"""

from __future__ import annotations

from typing import NamedTuple

from keepstep.records.summary import GroupMark, MemberProgress, StalledPeer

__all__ = ["CallsUnderWay"]

_COLLECTIVES = 0
_STALL_US = 700_000
_QUIET_S, _QUIET_PERIODS = 1.2, 1.5
"""Nothing passes where no byte was seen to for so long, and so many times the time between two words of a member: one
word may show what the one before did."""
_FRESH_S = 10.0


class _Told(NamedTuple):
    mark: GroupMark
    at: float
    since: float  # when its bytes were first as they are


class CallsUnderWay:
    """What every member of a generation told last of its calls, by group; `now` in seconds."""

    def __init__(self) -> None:
        self._generation = -1
        self._told: dict[tuple[int, int], _Told] = {}
        self._moving: dict[int, float] = {}

    def stalled(self, progress: MemberProgress, *, now: float) -> list[tuple[int, int]]:
        """The links, as (from, to) rank, that carry nothing though a call of this member has long waited for them."""
        if progress.generation != self._generation:
            self._generation, self._told, self._moving = progress.generation, {}, {}
        found: list[tuple[int, int]] = []
        for mark in progress.groups:
            if mark.lane == _COLLECTIVES and self._quiet(mark, progress.rank, now=now) and self._all_came(mark, now):
                found += [(progress.rank, peer.peer) for peer in mark.peers if _long(peer)]
        return found

    def _quiet(self, mark: GroupMark, rank: int, *, now: float) -> bool:
        """Whether a call is long under way and nothing passes in it, as far as its members have told."""
        before = self._told.get((mark.hash, rank))
        self._told[mark.hash, rank] = _Told(mark, now, now)
        if before is None or now - before.at > _FRESH_S or not before.mark.peers:
            return False
        quiet_s = max(_QUIET_S, _QUIET_PERIODS * (now - before.at))
        if _passed(before.mark, mark):
            self._moving[mark.hash] = now + quiet_s
            return False
        self._told[mark.hash, rank] = _Told(mark, now, before.since)
        long = mark.open_us >= _STALL_US and now - before.since >= quiet_s
        return long and now >= self._moving.get(mark.hash, 0.0)

    def _all_came(self, mark: GroupMark, now: float) -> bool:
        """Whether everybody who has told lately has begun the call of `mark`: else all wait for those who have not."""
        lately = (told for (group, _), told in self._told.items() if group == mark.hash and now - told.at <= _FRESH_S)
        return all(told.mark.started >= mark.started for told in lately)


def _passed(before: GroupMark, mark: GroupMark) -> bool:
    """Whether a call began, or bytes passed in the one under way, between two words of one member."""
    old = {peer.peer: _bytes(peer) for peer in before.peers}
    return before.started != mark.started or any(old.get(one.peer, _bytes(one)) != _bytes(one) for one in mark.peers)


def _bytes(peer: StalledPeer) -> tuple[int, int]:
    return peer.bytes_sent, peer.bytes_received


def _long(peer: StalledPeer) -> bool:
    return peer.wait_credit_us >= _STALL_US or peer.wait_peer_us >= _STALL_US
