"""What a standby rehearses while it has no role, kind by kind, and how it is clean again after each."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from keepstep.errors import KeepstepError, RecordError
from keepstep.records.sandbox_messages import MOST_KINDS, RoleKind, WarmedUp, WarmUp
from keepstep.records.step_recording import MAX_RECORDING_BYTES, Recording, check_key, decode_recording
from keepstep.store.machine_memory import free_bytes
from keepstep.training.agent_link import AgentLink
from keepstep.training.fabric import connect_fabric
from keepstep.training.process_state import ProcessState, forget_ranks, uses_meshes
from keepstep.training.replay import Replay
from keepstep.training.sandbox import Sandbox, SandboxOver, compiled_frames
from keepstep.training.step_recorder import recording_file, recording_key

__all__ = ["Rehearsals", "available_memory_bytes"]

_log = logging.getLogger("keepstep")
_MIB = 1 << 20
_ERROR_CHARACTERS = 300


class Rehearsals:
    """The rehearsals of one standby. `now` gives monotonic seconds.

    Used as a context manager around every run of the script: it ends a rehearsal however the script left it.
    """

    def __init__(self, link: AgentLink, *, now: Callable[[], float]) -> None:
        self.sandbox: Sandbox | None = None
        self._link = link
        self._now = now
        self._clean = ProcessState()
        self._order: WarmUp | None = None
        self._told = True
        self._due: deque[RoleKind] = deque()
        self._recordings: dict[str, Recording] = {}
        self._names: list[str] = []
        self._problems: list[str] = []
        self._elsewhere: list[int] = []
        self._begun = 0.0
        self._frames = 0
        self._hot = -1
        self._bound = False

    # ------------------------------------------------------------------ before a role

    def take(self, order: WarmUp) -> None:
        """These kinds are to be rehearsed."""
        self._order, self._told, self._begun = order, False, self._now()
        self._due = deque(order.kinds[-MOST_KINDS:])
        self._names, self._problems, self._elsewhere = [], [], []

    def next(self) -> Sandbox | None:
        """The next rehearsal, opened; None if none is due. Reports when the last one is over."""
        while self._due and not self._link.pending():
            sandbox = self._open(self._due.popleft())
            if sandbox is not None:
                return sandbox
        if not self._told:
            self._report()
        return None

    def _open(self, kind: RoleKind) -> Sandbox | None:
        assert self._order is not None
        if not recording_file(self._order.directory, kind.name).exists():
            self._elsewhere.append(kind.rank)
            return None
        try:
            recording = self._recordings[kind.name] = self._read(kind)
        except KeepstepError as error:
            self._problems.append(str(error))
            return None
        free = available_memory_bytes()
        if kind.memory_bytes > free:
            need, have = kind.memory_bytes // _MIB, free // _MIB
            self._problems.append(
                f"too little memory for the role of rank {kind.rank}: {need} MiB, {have} MiB are free"
            )
            return None
        self._forget_bound_code()
        self._frames = compiled_frames()
        sandbox = Sandbox(kind, self._order.world, replay=Replay(recording.calls), wanted=lambda: self._link.pending())
        sandbox.open()
        self._hot = kind.rank
        self.sandbox = sandbox
        return sandbox

    def _read(self, kind: RoleKind) -> Recording:
        assert self._order is not None
        path = recording_file(self._order.directory, kind.name)
        recording = decode_recording(_bounded(path), where=str(path))
        check_key(recording.key, recording_key(kind.name, world=self._order.world), where=str(path))
        return recording

    def _report(self) -> None:
        if self._elsewhere:
            ranks = ", ".join(map(str, sorted(self._elsewhere)))
            self._problems.append(
                f"no recording of a role like that of rank {ranks} is on this node: it lies in the run directory of"
                " the node whose member wrote it, and only standbys that see that directory rehearse"
            )
        why = "; ".join(self._problems)
        if why:
            _log.warning("keepstep: this standby is not as warm as it could be: %s", why)
        self._link.say(
            WarmedUp(tuple(self._names), round(self._now() - self._begun, 3), why, kept_code=not self._bound)
        )
        self._told = True

    # ------------------------------------------------------------------ around the script

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """True, and the process is clean, if the script was rehearsing; else the outcome is the script's own."""
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is None or isinstance(error, KeyboardInterrupt):
            return False
        if sandbox.finished:
            self._names.append(sandbox.kind.name)
        elif isinstance(error, Exception):
            text = f"{type(error).__name__}: {error}".split("\n", 1)[0][:_ERROR_CHARACTERS]
            self._problems.append(f"the rehearsal of rank {sandbox.kind.rank} failed: {text}")
        elif not self._link.pending() and not isinstance(error, SandboxOver):
            self._problems.append(f"the script ended in the rehearsal of rank {sandbox.kind.rank}")
        self._bound = self._bound or sandbox.asked_rank or (compiled_frames() > self._frames and uses_meshes())
        traceback.clear_frames(trace)
        self._clear(sandbox)
        return True

    def _clear(self, sandbox: Sandbox) -> None:
        gc.collect()
        forget_ranks()
        connect_fabric(None)
        gc.collect()
        sandbox.close()
        self._clean.restore()

    # ------------------------------------------------------------------ when there is a role

    def replay_for(self, rank: int) -> Replay:
        """The answers for the set-up of `rank`: recorded ones if a rank of its kind was recorded and read."""
        kinds = () if self._order is None else self._order.kinds
        name = next((kind.name for kind in kinds if rank in kind.ranks), "")
        recording = self._recordings.get(name)
        return Replay() if recording is None else Replay(recording.calls, own=recording.rank == rank)

    def prepare(self, rank: int) -> None:
        """This process is `rank` from now on: code that was compiled for another rank alone is forgotten."""
        if rank != self._hot:
            self._forget_bound_code()

    def _forget_bound_code(self) -> None:
        if self._bound and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
            self._bound = False


def _bounded(path: Path) -> bytes:
    """At most one byte more than a recording may have. Raises RecordError where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_RECORDING_BYTES + 1)
    except OSError as error:
        raise RecordError(f"no recording to rehearse with: {error.strerror}", where=str(path)) from error


def available_memory_bytes() -> int:
    """What this process could use: what the machine and its control groups have left, and what it holds already."""
    with open("/proc/self/statm", encoding="ascii") as file:
        own = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return free_bytes() + own
