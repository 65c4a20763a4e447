"""A member's side of a recording: the tape in its fabric, the kind of its role, the file in the run directory."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from keepstep import __version__
from keepstep.errors import RecordError
from keepstep.records.messages import Fact
from keepstep.records.sandbox_messages import KeepRecording, RecordingKept, RoleSeen
from keepstep.records.step_recording import Recording, RecordingKey, encode_recording
from keepstep.training.fabric import Fabric
from keepstep.training.hearing import HEARING
from keepstep.training.state import TrackedState
from keepstep.training.tape import Tape, TapedRole, peak_memory_bytes

__all__ = ["StepRecorder", "recording_file", "recording_key"]

_log = logging.getLogger("keepstep")


def recording_file(directory: str, kind: str) -> Path:
    """Where the recording of a role kind lies."""
    return Path(directory) / f"{kind}.rec"


def recording_key(kind: str, *, world: int) -> RecordingKey:
    """What a recording of `kind` made by this process, or for it, is of."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    try:
        digest = hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    except OSError:
        digest = str(script)
    return RecordingKey(
        job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        script=digest,
        world=world,
        kind=kind,
        keepstep=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
    )


class StepRecorder:
    """Does nothing unless `start` was called. Runs in the training thread; `obey` in the link's."""

    def __init__(self, fabric: Fabric, *, say: Callable[[Fact], None], now: Callable[[], float]) -> None:
        self._fabric = fabric
        self._say = say
        self._now = now
        self._role: TapedRole | None = None

    def start(self) -> None:
        """Record from here, the set-up, to the end of the second step."""
        HEARING.tape = Tape(self._now)

    def begin_step(self) -> None:
        """A step begins."""
        if HEARING.tape is not None:
            HEARING.tape.begin_step()

    def step_kept(self, tracked: TrackedState) -> None:
        """A step counts; after the last one to record the member says what kind of role it has."""
        tape = HEARING.tape
        if tape is None:
            return
        began = self._now()
        role = tape.step_kept(tracked.parameters.values(), tracked.optimizers.values())
        if role is None:
            return
        HEARING.tape = None
        self._role = role
        cost_s = round(tape.cost_s + self._now() - began, 6)
        device = torch.cuda.is_initialized() or any(not one.is_cpu for one in tracked.parameters.values())
        seen = RoleSeen(self._fabric.rank, role.name, peak_memory_bytes(), role.nbytes, cost_s, on_device=device)
        self._say(seen)

    def obey(self, order: KeepRecording) -> None:
        """Write the recording beside training, or forget it."""
        role, self._role = self._role, None
        if role is not None and order.keep:
            threading.Thread(
                target=self._write, args=(role, order.directory), name="keepstep-recording", daemon=True
            ).start()

    def _write(self, role: TapedRole, directory: str) -> None:
        why = ""
        try:
            key = recording_key(role.name, world=self._fabric.world)
            data = encode_recording(Recording(key, self._fabric.rank, role.calls))
            target = recording_file(directory, role.name)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            os.replace(part, target)
        except (OSError, RecordError) as error:
            why = f"rank {self._fabric.rank} could not keep the recording of its first steps: {error}"
            _log.warning("keepstep: %s", why)
        self._say(RecordingKept(self._fabric.rank, role.name, why))
