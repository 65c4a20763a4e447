"""What a training script uses: `join()` and the `Job` it gives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from keepstep.errors import PeerLost, UsageError
from keepstep.records.canary import canary_steps
from keepstep.records.domain_messages import CheckpointWritten
from keepstep.records.messages import BatchSeen, Finished
from keepstep.training.batch_shape import shape_words
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.data import Batches
from keepstep.training.guard import Guard
from keepstep.training.hearing import HEARING
from keepstep.training.held_back import silence
from keepstep.training.joining import Membership, become_member
from keepstep.training.spans import NO_SPANS
from keepstep.training.state import TrackedState
from keepstep.training.step import Step
from keepstep.training.tiers import Tier

__all__ = ["Job", "join"]

_log = logging.getLogger("keepstep")


def join() -> Job:
    """Take part in the job and set torch's default process group. Use it as `with keepstep.join() as job:`.

    Under `keepstep run` the job is protected. Under plain torchrun or plain python the same script runs unprotected
    and says so. In a standby this call returns when the process takes the place of a lost rank.
    Raises KeepstepError subclasses if the agent, the other members or the versions do not fit.
    """
    return Job(become_member())


class Job:
    """A member's view of the job; made by `join()`.

    `rehearsing` is true in a standby that runs the script only to be warm: what it does then counts for nothing. It is
    false in the one step that a joiner rehearses, which must call what the steps of the others call.
    """

    def __init__(self, membership: Membership) -> None:
        self.rank = membership.rank
        self.world = membership.world
        self.attempt = membership.attempt
        self.rehearsing = membership.sandbox is not None
        self.protected = membership.guard is not None or self.rehearsing
        self._membership = membership
        self._guard: Guard | None = membership.guard
        self._tracked: TrackedState | None = None
        self._hooks: list[Any] = []
        self._streams: list[Batches] = []
        self._begun = False
        self._finished = False
        self._canary_steps = canary_steps(os.environ.get("TORCHELASTIC_RUN_ID", ""))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._membership.sandbox is not None:
            self._membership.sandbox.leave(error)
            return
        if self._guard is not None and isinstance(error, Exception):
            self._guard.tell_error(error)
        elif self._guard is not None and error is None and self._begun:
            self._finish(self._guard)
        if self._guard is not None:
            self._guard.close()
        self._membership.close(orderly=error is None)

    def track(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Any = None,
        role: str = "",
    ) -> None:
        """Say what the state of this member is; call it once, before the first step.

        Each argument is one object, a list or a dict of them: modules (wrapped or not, buffers included), optimizers,
        learning rate schedulers, a GradScaler, and `extra`: anything with state_dict and load_state_dict. Random
        numbers and the positions of `data` streams are tracked by themselves. So are the values of `extra` objects of
        at most 16 KB: each rank has its own, alike or not. Larger ones, modules and all the rest must be the same on
        ranks that hold the same model. `role` tells apart members whose modules have equal names and shapes but
        different contents (hand-made pipeline stages).
        Raises UnsupportedState for something that cannot be carried to another process.
        """
        self._tracked = TrackedState(model, optimizer, schedulers=scheduler, scaler=scaler, extra=extra, role=role)
        if self._guard is None:
            return
        self._tracked.extras.capture(0)  # what cannot be carried is told here
        optimizers = self._tracked.optimizers
        closures = any(isinstance(o, torch.optim.LBFGS) for o in optimizers.values())
        self._guard.tracked = self._tracked
        given = len(optimizer) if isinstance(optimizer, (list, tuple, dict)) else int(optimizer is not None)
        # Only one torch optimizer has a moment that is known to come before all updates: its own pre-hook.
        self._guard.full = len(optimizers) != 1 or given != 1 or closures
        if not self._guard.full:
            self._hooks += [o.register_step_pre_hook(self._before_update) for o in optimizers.values()]

    def data(self, source: Any, *, name: str = "") -> Batches:
        """An endless iterator over `source` (DataLoader, StatefulDataLoader or any iterable) that an interrupted step
        rewinds and a joiner continues at the lost rank's position. Use one for every source.

        An iterator, such as a generator, cannot begin again: a joiner reads it from its beginning, and only the batches
        of the last steps are kept for a way back. Give the iterable itself where there is one."""
        spans = NO_SPANS if self._guard is None else self._guard.spans
        stream = Batches(source, name=name or f"data{len(self._streams)}", spans=spans)
        stream.redoable = self._guard is not None
        self._streams.append(stream)
        if self._membership.sandbox is not None:
            stream.take = self._membership.sandbox.take
        if self._guard is not None:
            stream.take = self._guard.drills.take
            if not self._streams[1:]:
                link = self._guard.link
                stream.on_first = lambda batch: link.say(BatchSeen(shape_words(batch)))
            self._guard.streams = self._streams
            if stream.once and self.rank == 0 and not self._guard.rehearsing:
                _log.warning(
                    "the data stream %s is an iterator: a joiner reads it from its beginning, and going back to a"
                    " checkpoint starts the whole job again -> give job.data() something that can be iterated again",
                    stream.name,
                )
        return stream

    def mirror(self, on: bool = True, *, every: int = 1) -> None:
        """Keep a copy of this member's state in the memory of another one, made after each `every` steps beside
        training; a loss then costs at most the steps since the last copy. It takes host memory for two versions of this
        member's own state and two of the one that it holds. Not called: done where some state has no replica on another
        node and what the copies still lack fits in half of the free memory. `on=False`: never; such a loss goes back
        to a checkpoint, or to the start. The same on every rank.
        """
        if every < 1:
            raise UsageError(f"a mirror every {every} steps", remedy="give a number of at least 1")
        if self._guard is not None:
            self._guard.mirrors.wanted = on
            self._guard.mirrors.every = every

    def checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 3,
        local: str | os.PathLike[str] | None = None,
        local_every: int = 0,
    ) -> None:
        """Write the tracked state after each `every` steps, in the background, and go back to it where neither a live
        replica nor a mirror of lost state is left, or when the job is started again. Keeps the newest `keep`.

        `directory` is storage that all nodes share; what is there is read by `torch.distributed.checkpoint`, too.
        `local` is a directory on the disk of each node, written after each `local_every` steps (0: each `every`). The
        newest step that every rank finds whole in one of the two counts. Call it on every rank, alike. A canary writes
        and reads none.
        """
        if every < 1 or keep < 1 or local_every < 0:
            what = f"checkpoint every {every} steps ({local_every} on local disk), keep {keep}"
            raise UsageError(what, remedy="give numbers of at least 1")
        if local is None and local_every:
            raise UsageError("local_every without local", remedy="give local=DIRECTORY, too")
        if self._guard is None or self._canary_steps:
            return
        shared = CheckpointWriter(Path(directory), rank=self.rank, world=self.world, keep=keep)
        shared.on_written = self._checkpoint_written
        tiers = [Tier(shared, every)]
        if local is not None:
            place = Path(local) / self._guard.fabric.address.node
            writer = CheckpointWriter(place, rank=self.rank, world=self.world, keep=keep, alone=True)
            tiers.append(Tier(writer, local_every or every, local=True))
        self._guard.tiers.set(tiers)
        self._guard.drills.checkpoints = Path(directory)
        self._guard.ask_for_checkpoint()

    def _checkpoint_written(self, step: int) -> None:
        """In the writing thread: this rank's part is on the disk."""
        if self._guard is not None:
            with contextlib.suppress(PeerLost):
                self._guard.link.say(CheckpointWritten(self.rank, step))

    def steps(self, total: int) -> Iterator[Step]:
        """The steps still to be made up to `total` updates. Each is one `with step:` block around one update; a step
        that was aborted is yielded again with the same number, batches and random numbers."""
        if total < 0:
            raise UsageError(f"steps(total={total})", remedy="give the number of updates to make, at least 0")
        if self._membership.sandbox is not None:
            yield from self._membership.sandbox.steps(total)
        if self._guard is None:
            for number in range(total):
                yield from _watched(Step(None, number))
            return
        if self._tracked is None:
            raise UsageError("job.steps() before job.track()", remedy="call job.track(model=..., optimizer=...) first")
        guard = self._guard
        if self._canary_steps:
            total = min(total, self._canary_steps)
        self._begun = True
        if guard.rehearsing:
            yield from self._rehearse(guard)
        while True:
            guard.boundary(last=guard.state.version >= total)
            if guard.state.version < total:
                yield from _watched(Step(guard, guard.state.version), guard)
            elif guard.finish():
                break
        self._finish(guard)

    def _rehearse(self, guard: Guard) -> Iterator[Step]:
        """A joiner's first step runs without the others, up to the agreement: it builds buckets and warms caches."""
        if HEARING.replay is not None:
            HEARING.replay.end_set_up(self.rank)
        with silence():
            yield from _watched(Step(guard, 0), guard)
        guard.rehearsing = False
        if self._tracked is not None:
            self._tracked.gradient_buckets.alone = True
        HEARING.replay = None  # what it still answers alone concerns the state to come

    def _finish(self, guard: Guard) -> None:
        assert self._tracked is not None
        if not self._finished:
            self._finished = True
            guard.link.say(Finished(guard.state.version, self._tracked.weights_sha256()))

    def _before_update(self, *hook: Any) -> None:
        """The optimizers' step pre-hook: (optimizer, args, kwargs)."""
        assert self._guard is not None
        _, args, kwargs = hook
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            self._guard.keep_everything()  # its collectives come after this hook: the agreement waits for the end
        elif not (self._guard.agreed or self._guard.full):
            self._guard.agree(updating=True)


def _watched(step: Step, guard: Guard | None = None) -> Iterator[Step]:
    """Hands out a step; what is taken from `data` from now on belongs to it.

    Raises UsageError if its block was not used: nothing would ever count.
    """
    if guard is not None:
        guard.begin_step()
    yield step
    if not step.entered:
        raise UsageError(
            f"step {step.number} was taken from job.steps() but `with step:` was not used",
            remedy="put the whole body of the loop inside `with step:`",
        )
