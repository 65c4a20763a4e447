"""Every now and then each rank says what its weights hash to, so that replicas that drift apart are seen.

A flipped bit spreads to nobody and shows in no loss for a long time. The check costs a hash over the weights; it is
made so rarely that it takes at most a thousandth of the time.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.records.messages import StateDigest
from keepstep.training.state import TrackedState

__all__ = ["Checkup"]

_FIRST_EVERY = 16
_MOST_EVERY = 4096
_SHARE = 1e-3


class Checkup:
    """The checks of one rank, a power of two of steps apart, so that replicas of unlike speed still meet."""

    def __init__(self, rank: int, *, say: Callable[[StateDigest], None], now: Callable[[], float]) -> None:
        """`now` gives monotonic seconds."""
        self.every = _FIRST_EVERY
        self._rank = rank
        self._say = say
        self._now = now
        self._cost_s = float("inf")
        self._last: tuple[int, float] | None = None

    def kept(self, version: int, tracked: TrackedState) -> None:
        """The state has seen `version` updates: hash it if it is time."""
        if version % self.every:
            return
        began = self._now()
        fact = StateDigest(self._rank, version, tracked.parameter_digest(), tracked.replica_key())
        self._say(fact)
        self._cost_s = min(self._cost_s, self._now() - began)  # the least: whatever came in between is no cost of ours
        if self._last is not None and version > self._last[0]:
            step_s = (began - self._last[1]) / (version - self._last[0])
            while self.every < _MOST_EVERY and self._cost_s > _SHARE * self.every * step_s:
                self.every *= 2
        self._last = version, began
