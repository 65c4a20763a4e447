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
    """The clocks of this machine."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC, the clock the recorder ring uses too."""
        return time.monotonic()
