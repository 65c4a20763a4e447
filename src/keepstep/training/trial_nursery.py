"""The process behind `keepstep preflight`: imports torch once and forks one child for each rank under trial.

`python -m keepstep.training.trial_nursery`. A line `RANK PLAN` on standard input starts the trial of a rank, PLAN being
a file with a `TrialPlan` as JSON; lines `started RANK PID` and `ended RANK CODE` (128 + signal) come out. It ends with
its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import selectors
import signal
from pathlib import Path

import msgspec
import torch._dynamo  # optimizers import it when they are first used: paid once here, not in each trial
import torch.distributed.fsdp
import torch.distributed.tensor

from keepstep.records.trial import TrialPlan
from keepstep.training.trial_script import run_trial

__all__ = ["main"]

_PAID_BEFORE = (torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_PLAN_BYTES = 4 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve until the input ends; then nothing that was started is left."""
    _Nursery().serve()
    os._exit(0)  # nothing of torch has to be taken down in order


class _Nursery:
    """Starts trials and tells how they end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._trials: dict[int, tuple[int, int]] = {}
        self._input = b""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """The loop."""
        self._selector.register(0, selectors.EVENT_READ)
        _say("ready")
        while True:
            for key, _ in self._selector.select():
                if key.fd != 0:
                    self._reap(key.fd)
                elif not self._read():
                    self._end_all()
                    return

    def _read(self) -> bool:
        data = os.read(0, 4096)
        lines = (self._input + data).split(b"\n")
        self._input = lines.pop()
        for line in lines:
            rank, _, plan = line.partition(b" ")
            self._start(int(rank), plan)
        return bool(data)

    def _start(self, rank: int, plan: bytes) -> None:
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            _become(plan, rank)
        descriptor = os.pidfd_open(pid)
        self._trials[descriptor] = (rank, pid)
        self._selector.register(descriptor, selectors.EVENT_READ)
        _say(f"started {rank} {pid}")

    def _reap(self, descriptor: int) -> None:
        rank, pid = self._trials.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what the script left behind, while the pid is still ours
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not self._trials:
            self._sweep()
        _say(f"ended {rank} {code if code >= 0 else 128 - code}")

    def _sweep(self) -> None:
        """End what got away from its process group: without a trial under way all children are such."""
        for word in Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _end_all(self) -> None:
        for _, pid in self._trials.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._sweep()


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _become(plan_file: bytes, rank: int) -> None:
    """In the child: own session, own output, a stack dump instead of a hang; then the script."""
    os.setsid()
    data = Path(os.fsdecode(plan_file)).read_bytes()[:_MOST_PLAN_BYTES]
    plan = msgspec.json.decode(data, type=TrialPlan)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    directory = Path(plan.directory)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(directory / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for descriptor, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    stack = open(directory / f"rank-{rank}.stack", "w")  # noqa: SIM115 faulthandler writes it at the very end
    faulthandler.enable(file=stack)
    faulthandler.dump_traceback_later(plan.limit_s, exit=True, file=stack)
    run_trial(plan, rank)


if __name__ == "__main__":
    main()
