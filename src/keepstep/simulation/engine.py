"""Simulated time and chance: an agenda of things to do, all drawn from one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

__all__ = ["Channel", "Engine"]


class Engine:
    """Runs what is due in order of simulated time (seconds); equal seeds give equal runs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay_s` seconds; at equal times in the order of the calls."""
        self._count += 1
        heapq.heappush(self._agenda, (self.now + delay_s, self._count, action))

    def run(self, *, until_s: float, done: Callable[[], bool]) -> bool:
        """Work off the agenda; True if `done` came before `until_s` and before nothing was left to do."""
        while not done():
            if not self._agenda or self._agenda[0][0] > until_s:
                return False
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        return True

    def delay(self, mean_s: float) -> float:
        """A random delay around `mean_s`, sometimes twenty times as long, 5 s at most."""
        scale = 20.0 if self.rng.random() < 0.02 else 1.0
        return min(self.rng.expovariate(1.0 / mean_s) * scale, 5.0)


class Channel:
    """Delivers in order, each message after a random delay. Different channels overtake each other."""

    def __init__(self, engine: Engine, mean_s: float) -> None:
        self._engine = engine
        self._mean_s = mean_s
        self._last = 0.0

    def send(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` after what was sent before has been delivered."""
        self._last = max(self._last, self._engine.now + self._engine.delay(self._mean_s))
        self._engine.at(self._last - self._engine.now, deliver)
