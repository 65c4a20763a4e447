"""A rehearsal of a role kind: the script's real training step with communication cut off.

Collectives are answered from a recording, what the script writes and prints is held back, and after two steps the
script is unwound by an exception that only the standby knows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from keepstep.records.sandbox_messages import RoleKind
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.hearing import HEARING
from keepstep.training.held_back import HeldBack, own_streams, silence
from keepstep.training.replay import Replay, objects_are_none
from keepstep.training.script_threads import ScriptThreads
from keepstep.training.step import Step
from keepstep.training.tape import RECORDED_STEPS

__all__ = ["Sandbox", "SandboxFabric", "SandboxOver", "compiled_frames", "rehearsed_variables"]

_TICK_S = 0.5
_PATIENCE_TICKS = 60
_EXIT_STUCK = 75


class SandboxOver(BaseException):
    """Unwinds a script at the end of its rehearsal; never reaches the user's handlers for `Exception`."""


class SandboxFabric(Fabric):
    """What process groups ask a fabric, in LOCAL mode alone: nothing is listened to, nobody is called."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.ranks = tuple(range(world))
        self.protected = True
        self.exposed = False
        self.drills = None

    @property
    def mode(self) -> Mode:
        """Always LOCAL."""
        return Mode.LOCAL

    def close_group(self, group: str) -> None:
        """There is nothing to close."""

    def close(self) -> None:
        """There is nothing to close."""


class Sandbox:
    """One rehearsal of `kind` in a job of `world` ranks. `wanted()` says that the standby is needed for something else.

    It holds back files and output between `open` and `close`. `asked_rank` is set where code was compiled that asked
    for the own rank, which is then a constant in it.
    """

    def __init__(self, kind: RoleKind, world: int, *, replay: Replay, wanted: Callable[[], bool]) -> None:
        self.kind = kind
        self.world = world
        self.replay = replay
        self.fabric = SandboxFabric(kind.rank, world)
        self.asked_rank = False
        self.finished = False
        self._wanted = wanted
        self._held = contextlib.ExitStack()
        self._threads = ScriptThreads()
        self._files = HeldBack()
        self._errors = -1
        self._closed = threading.Event()

    def open(self) -> None:
        """From here on nothing of this process is seen outside."""
        self._errors = os.dup(2)
        self._held.callback(os.close, self._errors)
        threading.Thread(target=self._watch, args=(os.dup(2),), name="keepstep-rehearsal", daemon=True).start()
        HEARING.replay = self.replay
        self._held.enter_context(silence())
        self._held.enter_context(own_streams())
        self._held.enter_context(self._files)
        self._held.enter_context(objects_are_none(self.replay, applies=lambda: True))
        self._held.enter_context(self._asking())
        self._held.enter_context(self._threads)

    def close(self) -> None:
        """The rehearsal is over: files and output are the process's own again.

        Ends the process where threads of the script are still at work: what they write would go into the world.
        """
        if left := self._threads.wait(_PATIENCE_TICKS):
            self._make_room(
                f"threads of the script go on after the rehearsal of this standby ({', '.join(left)})", self._errors
            )
        self._closed.set()
        HEARING.replay = None
        self._held.close()

    def steps(self, total: int) -> Iterator[Step]:
        """Two steps at most, then the end. Raises SandboxOver."""
        for number in range(min(total, RECORDED_STEPS)):
            self.check()
            yield Step(None, number)
        self.finished = True
        raise SandboxOver

    def take(self, iterator: Any) -> Any:
        """The next item of a data source."""
        self.check()
        return next(iterator)

    def check(self) -> None:
        """Raises SandboxOver if there is something better to do."""
        if self._wanted():
            raise SandboxOver

    def leave(self, error: BaseException | None) -> None:
        """The script leaves its `with join()` block. Raises SandboxOver unless it does so with an error."""
        if error is None:
            raise SandboxOver

    def _watch(self, errors: int) -> None:
        """A rehearsal that does not end although the standby is needed ends the process: another takes its place."""
        ticks = 0
        while not self._closed.wait(_TICK_S) and ticks < _PATIENCE_TICKS:
            ticks = ticks + 1 if self._wanted() else 0
        if not self._closed.is_set():
            self._make_room("this standby is needed, but its rehearsal does not end", errors)
        os.close(errors)

    def _make_room(self, why: str, errors: int) -> NoReturn:
        """End the process, and say so on the descriptor `errors`."""
        os.write(errors, f"keepstep: {why}: it makes room\n".encode())
        self._files.discard()
        os._exit(_EXIT_STUCK)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Notice where code that is being compiled asks for its rank."""
        original = KeepstepGroup.rank, KeepstepGroup.getRank

        def rank(group: KeepstepGroup) -> int:
            self.asked_rank = self.asked_rank or torch._guards.TracingContext.try_get() is not None
            return original[0](group)

        KeepstepGroup.rank, KeepstepGroup.getRank = rank, rank  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            KeepstepGroup.rank, KeepstepGroup.getRank = original  # type: ignore[method-assign]


def rehearsed_variables(kind: RoleKind, *, world: int) -> dict[str, str]:
    """torchrun's variables as the rank found them that recorded what is rehearsed."""
    return {
        "RANK": str(kind.rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(kind.local_rank),
        "LOCAL_WORLD_SIZE": str(kind.local_world),
        "GROUP_RANK": str(kind.node_rank),
        "ROLE_RANK": str(kind.rank),
    }


def compiled_frames() -> int:
    """How many pieces of code torch.compile has compiled in this process, 0 where nobody used it."""
    counting = sys.modules.get("torch._dynamo.utils")
    return 0 if counting is None else int(counting.counters["frames"]["total"])
