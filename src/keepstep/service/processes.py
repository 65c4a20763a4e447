"""Start, watch and end one process group. Nothing started here outlives the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

__all__ = ["ChildProcess", "frozen", "start_process"]

_PR_SET_PDEATHSIG = 1
_EXIT_PARENT_GONE = 127
_libc = ctypes.CDLL(None, use_errno=True)


class ChildProcess:
    """A running child in its own session. `code` and `signal` are set once it is gone."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        """Watch `popen`; the caller owns its pipes."""
        self.pid = popen.pid
        self.stdout = popen.stdout
        self.stderr = popen.stderr
        self.code = 0
        self.signal = 0
        self.gone = asyncio.Event()
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` in the running loop as soon as the process is gone and reaped."""
        loop = asyncio.get_running_loop()

        def reap() -> None:
            loop.remove_reader(self._pidfd)
            self.send(signal.SIGKILL)  # what is left of its group, while the pid is still ours
            status = self._popen.wait()
            self.code, self.signal = (status, 0) if status >= 0 else (128 - status, -status)
            os.close(self._pidfd)
            self.gone.set()
            on_exit()

        loop.add_reader(self._pidfd, reap)

    def send(self, number: int) -> None:
        """Send a signal to the whole process group; a group that is gone is no error."""
        if not self.gone.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds; returns when the process is gone.

        A frozen process gets no SIGTERM: should it wake up within the grace, it hears first that it is fenced.
        """
        if grace_s > 0:
            if not frozen(self.pid):
                self.send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), grace_s)
        self.send(signal.SIGKILL)
        await self.gone.wait()


def start_process(argv: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
    """Start `argv` with piped output in its own session; the kernel kills it when this process dies.

    Must run in the main thread (the death signal follows the thread that forked). Raises OSError.
    """
    parent = os.getpid()

    def tie_to_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_EXIT_PARENT_GONE)

    popen = subprocess.Popen(
        list(argv),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=tie_to_parent,
    )
    return ChildProcess(popen)


def frozen(pid: int) -> bool:
    """Whether a process is stopped by a signal (state T; a process held by a debugger, state t, is not)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(1024).rpartition(b")")[2].split(maxsplit=1)[0] == b"T"
    except (OSError, IndexError):
        return False
