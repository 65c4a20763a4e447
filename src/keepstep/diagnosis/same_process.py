"""Whether two dumps of one rank can be of one process: it numbers its calls in the order of time."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["Remembered", "are_of_two", "share_a_call"]

Remembered = tuple[tuple[int, float], ...]
"""Sequence number and time of the oldest and of the newest call of a group that a dump remembers."""

_SAME_S = 0.05
"""The calls of a batch share a number; the times of one number are no further apart than this."""
_WRAP = 1 << 31


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
