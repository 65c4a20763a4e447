"""Cleans up after an agent that is killed: a tiny process that ends the groups left behind, their children included.

The kernel kills members when their agent dies (PR_SET_PDEATHSIG), but not what members started themselves.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from keepstep.errors import EnvironmentProblem

__all__ = ["Warden"]

_PROGRAM = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    pid = int(line[1:])
    groups.add(pid) if line[0] == "+" else groups.discard(pid)
for pid in groups:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
"""


class Warden:
    """Knows the process groups that run; acts when this process is gone, however it went."""

    def __init__(self) -> None:
        """Start the warden. Raises EnvironmentProblem."""
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentProblem(f"cannot start a process: {error.strerror}", remedy="see `ulimit -u`") from error

    def add(self, pid: int) -> None:
        """A group runs."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """A group has ended."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """End the warden; what it still knows of is killed."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
