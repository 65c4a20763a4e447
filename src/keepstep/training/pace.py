"""Calibrated waiting: a rank that computes F times as long as it would, measured at its own pace.

Between two collectives a rank computes. `Pace` knows how long that took and waits (F - 1) times as long before the next
one, so that a drilled rank is slow without taking the processor from its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """The time a rank computes; made as a step begins. `factor` 1 only measures. `now` gives monotonic seconds.

    `step_s` is what the last whole step computed, waits for data and collectives and the drill's own waiting left out;
    0 until one was seen.
    """

    def __init__(self, now: Callable[[], float], *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.factor = 1.0
        self.step_s = 0.0
        self._now = now
        self._sleep = sleep
        self._since = now()
        self._computed_s = 0.0
        self._owed_s = 0.0

    def begin_step(self) -> None:
        """A step begins: what was computed before belongs to the last one."""
        self.pause()
        self.step_s, self._computed_s = self._computed_s, 0.0
        self.resume()

    def pause(self) -> None:
        """Computing stops here for a collective: wait for what the drill adds."""
        self.defer()
        owed_s, self._owed_s = self._owed_s, 0.0
        if self.factor > 1.0:
            self._sleep(owed_s * (self.factor - 1.0))
        self.resume()

    def defer(self) -> None:
        """Computing stops here for a batch; what the drill adds is waited for at the next collective."""
        computed_s = max(self._now() - self._since, 0.0)
        self._computed_s += computed_s
        self._owed_s += computed_s
        self._since = self._now()

    def resume(self) -> None:
        """Computing goes on here."""
        self._since = self._now()
