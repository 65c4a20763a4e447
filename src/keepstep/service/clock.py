"""The clock door of the service: the only file here that reads a clock."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the service asks about time."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps; only differences mean anything."""


class SystemClock:
    """The clocks of this machine. The wall clock is read once: later corrections of it move no deadline."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch, as the wall clock stood when this object was made, plus the time since."""
        return self._offset + time.monotonic()

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC, the clock the recorder ring uses too."""
        return time.monotonic()
