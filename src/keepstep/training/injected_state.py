"""Faults of state on purpose: a rank that gives its state away slowly, a byte flipped in the newest checkpoint."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

__all__ = ["CorruptCheckpoint", "StateWire", "ThrottleState"]

_OTHER_FILES = (".json", ".tmp", ".part")


class StateWire(Protocol):
    """What serves the state of this process (`StateServer`)."""

    hold: Callable[[int, Callable[[], None]], None] | None


class ThrottleState:
    """State leaves this rank at `rate` bytes/s, or (0) so that it takes `factor` times as long."""

    def __init__(self, wire: StateWire | None, *, rate: float, factor: float, now: Callable[[], float]) -> None:
        self._wire = wire
        self._rate = rate
        self._factor = factor
        self._now = now
        self._one = threading.Lock()

    def begin(self, step: int) -> str | None:
        """From now on; never where no state is served."""
        if self._wire is None:
            return None
        self._wire.hold = self.hold
        return f"{self._rate:.4g} bytes/s" if self._rate else f"{self._factor:g} times as long"

    def hold(self, nbytes: int, send: Callable[[], None]) -> None:
        """Send, then wait for what the drill adds; one reply after the other, as on one slow wire."""
        with self._one:
            began = self._now()
            send()
            took = max(self._now() - began, 0.0)
            time.sleep(max(0.0, nbytes / self._rate - took) if self._rate else took * (self._factor - 1.0))

    def end(self) -> None:
        """As fast as ever."""
        if self._wire is not None:
            self._wire.hold = None


class CorruptCheckpoint:
    """One byte in the middle of what `rank` wrote of the newest checkpoint under `directory()` is flipped."""

    def __init__(self, directory: Callable[[], Path | None], rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def begin(self, step: int) -> str | None:
        """As soon as there is a checkpoint."""
        directory = self._directory()
        places = sorted(directory.glob("step-*"), reverse=True) if directory is not None else []
        for place in places:
            files = [file for file in place.iterdir() if file.suffix not in _OTHER_FILES and self._is_ours(file)]
            largest = max(files, key=lambda file: file.stat().st_size, default=None)
            if largest is not None and largest.stat().st_size:
                return _flip_middle(largest)
        return None

    def _is_ours(self, file: Path) -> bool:
        """Whether the first number in the name of `file` is this rank's."""
        number = re.search(r"\d+", file.name)
        return number is not None and int(number.group()) == self._rank

    def end(self) -> None:
        """It stays flipped."""


def _flip_middle(path: Path) -> str:
    with path.open("r+b") as file:
        at = path.stat().st_size // 2
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))
    return f"byte {at} of {path.parent.name}/{path.name}"
