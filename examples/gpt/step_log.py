"""When each rank began each step: one line a step in a file that all ranks append to, for measurements."""

from __future__ import annotations

import os
import time

__all__ = ["StepLog"]


class StepLog:
    """Writes `time step rank pid` (seconds since 1970) in one append, so that lines of several processes do not mix.

    With an empty path it writes nothing.
    """

    def __init__(self, path: str, *, rank: int) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else -1
        self.who = f"{rank} {os.getpid()}"

    def begin(self, step: int) -> None:
        if self.file >= 0:
            os.write(self.file, f"{time.time():.6f} {step} {self.who}\n".encode())
