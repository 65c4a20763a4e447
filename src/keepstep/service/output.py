"""What training processes print: kept in log files, echoed to the console with the rank in front, never blocking."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["MAX_LINE_BYTES", "Console", "LogFile", "PipeReader", "split_lines"]

MAX_LINE_BYTES = 8192
"""Longer lines are cut into pieces of this size."""
_READ_BYTES = 65536
_MAX_WAITING_LINES = 10_000
_CLOSE_S = 2.0


def split_lines(buffer: bytes, *, final: bool = False) -> tuple[list[bytes], bytes]:
    """Whole lines in `buffer` without their ends, and the rest. Lines over MAX_LINE_BYTES come in pieces."""
    lines = buffer.split(b"\n")
    rest = lines.pop()
    pieces = [line[i : i + MAX_LINE_BYTES] for line in lines for i in range(0, max(len(line), 1), MAX_LINE_BYTES)]
    while len(rest) > MAX_LINE_BYTES or (final and rest):
        pieces.append(rest[:MAX_LINE_BYTES])
        rest = rest[MAX_LINE_BYTES:]
    return pieces, rest


class Console:
    """Writes lines to the terminal from a thread of its own, so that a terminal that stands still delays nothing.

    With more than 10,000 lines waiting, further ones are left out here (the log files have them) and counted.
    """

    def __init__(self, write: Callable[[str, bool], None] | None = None) -> None:
        """`write(line, is_error)` puts one line out; the default prints to stdout or stderr."""
        self.write = write or _print_line
        self.left_out = 0
        self._lines: queue.Queue[tuple[str, bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="keepstep-console", daemon=True)
        self._thread.start()

    def say(self, line: str, *, error: bool = False) -> None:
        """Put a line out, in order."""
        if self._lines.qsize() >= _MAX_WAITING_LINES:
            self.left_out += 1
        else:
            self._lines.put((line, error))

    def close(self) -> None:
        """Write what waits, for two seconds at most."""
        if self.left_out:
            self._lines.put((f"keepstep: {self.left_out} lines not shown here, see the log files", True))
        self._lines.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                self.write(*item)


def _print_line(line: str, error: bool) -> None:
    print(line, file=sys.stderr if error else sys.stdout, flush=True)


class LogFile:
    """An append-only log. When the disk refuses, lines are dropped and counted, and `on_trouble` is told once."""

    def __init__(self, path: Path, *, on_trouble: Callable[[str], None]) -> None:
        """Lazily opened, so that a full disk never stops a process from being started."""
        self.dropped = 0
        self._path = path
        self._file: IO[bytes] | None = None
        self._on_trouble = on_trouble

    def write(self, data: bytes) -> None:
        """Append `data`."""
        try:
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 closed in close()
            self._file.write(data)
        except OSError as error:
            if not self.dropped:
                self._on_trouble(f"cannot write {self._path}: {error.strerror}")
            self.dropped += 1

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class PipeReader:
    """Reads one pipe of a process without blocking and hands over lines."""

    def __init__(self, pipe: IO[bytes], on_line: Callable[[bytes], None], *, on_data: Callable[[bytes], None]) -> None:
        """`on_data` gets the bytes as they are, `on_line` every line."""
        self._pipe = pipe
        self._on_data = on_data
        self._on_line = on_line
        self._rest = b""
        self._open = True
        os.set_blocking(pipe.fileno(), False)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._readable)

    def drain(self) -> None:
        """Read what is left and close; for a process that is gone."""
        for _ in range(64):  # 4 MiB at most: a pipe holds less
            if not self._open or not self._readable():
                break
        self._finish()

    def _readable(self) -> bool:
        """Read once; False at the end or when nothing is there."""
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._finish()
            return False
        self._on_data(data)
        lines, self._rest = split_lines(self._rest + data)
        for line in lines:
            self._on_line(line)
        return True

    def _finish(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._pipe.close()
            for line in split_lines(self._rest, final=True)[0]:
                self._on_line(line)
