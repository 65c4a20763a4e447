"""When the observer of a node reads the rings of its members: of all at once, a step is judged once all told it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LOOK_NS", "are_due", "pause_s"]

LOOK_NS = 62_500_000
_TOGETHER_NS = 125_000_000
"""A member that has something to say waits so long at most for the others."""


def are_due(moments_ns: Sequence[int], now_ns: int) -> bool:
    """Whether to read now the rings of members that will have something to say from these moments on.

    Not while one more of them will have soon, unless one has waited for that.
    """
    waits = [moment - now_ns for moment in moments_ns]
    first = min(waits, default=1)
    return first <= -_TOGETHER_NS or (first <= 0 and not any(0 < wait < _TOGETHER_NS for wait in waits))


def pause_s(moments_ns: Sequence[int], now_ns: int) -> float:
    """How long to wait before the next look: until the last of those that come soon."""
    soon = [wait for moment in moments_ns if 0 < (wait := moment - now_ns) < _TOGETHER_NS]
    return min(max(soon, default=LOOK_NS), LOOK_NS) / 1e9
