"""Whether dumps can be of one process or job: calls are numbered in the order of time, and all wait for all."""

from __future__ import annotations

from itertools import pairwise

from keepstep.records.evidence import Position

__all__ = ["Remembered", "are_of_two", "are_of_two_starts", "share_a_call"]

Remembered = tuple[tuple[int, float], ...]
"""Sequence number and time of the oldest and of the newest call of a group that a dump remembers."""

_SAME_S = 0.05
"""The calls of a batch share a number; the times of one number are no further apart than this."""
_WRAP = 1 << 31
_AHEAD = 2
"""Collectives by which a member may have finished more than another has called: one that it called by mistake."""


def are_of_two(one: Remembered, other: Remembered) -> bool:
    """Whether the calls cannot be those of one process: a later number was called earlier, or one number twice."""
    for (number, at), (later, then) in pairwise(sorted({*one, *other})):
        if later - number >= _WRAP:
            continue
        if then < at or (number == later and then - at > _SAME_S):
            return True
    return False


def share_a_call(one: Remembered, other: Remembered) -> bool:
    """Whether both remember one and the same call, so that one process wrote both."""
    return not set(one).isdisjoint(other)


def are_of_two_starts(one: Position, other: Position) -> bool:
    """Whether two members of a group cannot be of one start of a job.

    One has finished what the other has not called, and none of the calls of either was made while the other made its.
    """
    ahead, behind = (one, other) if (one.finished or 0) > (other.finished or 0) else (other, one)
    if not one.remembered or not other.remembered or ahead.finished is None or behind.queued is None:
        return False
    if ahead.finished < behind.queued + _AHEAD:
        return False
    (_, first), (_, last) = ahead.remembered
    (_, other_first), (_, other_last) = behind.remembered
    return last + _SAME_S < other_first or other_last + _SAME_S < first
