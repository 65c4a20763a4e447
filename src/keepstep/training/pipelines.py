"""Pipeline schedules of torch (`torch.distributed.pipelining`) in a job whose members come and go.

A schedule prepares its stages in its first step, by messages from stage to stage. A joiner prepares alone instead and
asks its neighbours for the shapes it cannot know. Where it cannot, because a neighbour joins at the same time, all
members prepare anew in the next step. Whether a schedule is prepared goes back with a redone step, and to "no" where
everybody starts at version 0, so that either all members prepare in a step or none. A process that starts at a later
version prepares what the job had prepared before: that must leave no trace in buffers.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import KeepstepError, StateError
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.stage_shapes import (
    StageAsked,
    StageShapes,
    ask_shapes,
    shapes_of,
    tell_shapes,
    tensors_of,
)

__all__ = ["Pipelines"]

_SCHEDULES = "torch.distributed.pipelining.schedules"
_FLAGS = (
    "_stage_forward_initialized",
    "_stage_backward_initialized",
    "_stages_forward_initialized",
    "_stages_backward_initialized",
)
_Prepare = Callable[..., tuple[bool, bool]]


class Pipelines:
    """The schedules of this process, from the first step on that one of them makes."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._stages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._schedules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: list[tuple[weakref.ref[Any], dict[str, bool]]] = []
        self._unprepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._again: weakref.WeakSet[Any] = weakref.WeakSet()
        self._made_again: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped = self._failed = False
        self._late = self._late_next = False  # this step, or the next, is the first one here of a job in its middle
        self._why = ""
        self._original: _Prepare | None = None
        fabric.serve("stage", lambda sock: tell_shapes(sock, self._shapes))

    def begin_step(self, *, rehearsing: bool = False) -> None:
        """Remember which schedules are prepared; take care of all if the script uses any."""
        self._stepped = self._stepped or not rehearsing
        self._late, self._late_next = self._late_next, False
        if self._original is None:
            if _SCHEDULES not in sys.modules:
                return
            self._watch()
        self._kept = [(weakref.ref(one), _flags(one)) for one in self._schedules]
        self._made_again.clear()

    def redo(self) -> None:
        """Back to what `begin_step` remembered; schedules that were new then are not prepared."""
        kept = {id(one): flags for one, flags in ((ref(), flags) for ref, flags in self._kept) if one is not None}
        for schedule in self._schedules:
            vars(schedule).update(kept.get(id(schedule), dict.fromkeys(_flags(schedule), False)))
        self._again.update(self._made_again)
        self._late_next = self._late

    def rehearsed(self, *, whole: bool) -> None:
        """A step was rehearsed, up to its agreement or, not `whole`, until something in it failed."""
        self._failed = not whole

    def check(self) -> None:
        """Raises StateError if a schedule was to be prepared alone and could not, or the rehearsal failed before it
        came to one: all others have prepared theirs."""
        if self._unprepared or (self._failed and self._came_to_none):
            raise StateError(f"a pipeline schedule is not prepared: {self._why or 'its first step failed'}")

    @property
    def unprepared(self) -> bool:
        """Whether a rehearsal has left a schedule unprepared that the others may have prepared, or came to none."""
        return bool(self._unprepared) or self._came_to_none

    @property
    def _came_to_none(self) -> bool:
        return self._original is not None and not self._schedules

    def run_on(self, version: int, *, anew: bool) -> None:
        """The job goes on with the step behind `version` updates; `anew`: all members prepare schedules anew."""
        if version == 0 or anew:
            self.forget(again=version > 0)
        self._late_next = version > 0 and not self._stepped

    def forget(self, *, again: bool = False) -> None:
        """No schedule is prepared: all members prepare anew in the step that comes. `again`: an undisturbed run would
        not, so it must leave no trace."""
        for schedule in self._schedules:
            flags = _flags(schedule)
            if again and (any(flags.values()) or schedule in self._unprepared):
                self._again.add(schedule)
            vars(schedule).update(dict.fromkeys(flags, False))
        self._unprepared.clear()
        if not again:
            self._again.clear()

    def close(self) -> None:
        """Leave torch as it was."""
        if self._original is not None:
            sys.modules[_SCHEDULES]._PipelineSchedule._initialize_pp_stages = self._original  # type: ignore[attr-defined]

    def _watch(self) -> None:
        kind: Any = sys.modules[_SCHEDULES]._PipelineSchedule  # type: ignore[attr-defined]
        original: _Prepare = kind._initialize_pp_stages
        self._original = original

        def prepare(schedule: Any, stages: list[Any], *rest: Any, **options: Any) -> tuple[bool, bool]:
            late = self._late and schedule not in self._schedules
            self._schedules.add(schedule)
            self._stages.update(stages)
            if self._fabric.mode is Mode.LOCAL and all(hasattr(stage, "_user_meta") for stage in stages):
                return self._prepare_alone(
                    partial(original, schedule, stages, *rest, **options), schedule, stages=stages
                )
            if schedule not in self._again and not late:
                return original(schedule, stages, *rest, **options)
            with _buffers_kept(stages):
                prepared = original(schedule, stages, *rest, **options)
            self._again.discard(schedule)
            self._made_again.add(schedule)
            return prepared

        kind._initialize_pp_stages = prepare

    def _prepare_alone(self, original: _Prepare, schedule: Any, *, stages: list[Any]) -> tuple[bool, bool]:
        """As torch does it, with the vote and the messages of the stages answered here."""
        self._unprepared.add(schedule)
        schedule._warmup_p2p = _vote_alone
        for stage in stages:
            stage._send_meta = lambda *_: None
            stage._recv_meta = partial(self._received, stage)
        try:
            prepared = original()
            self._unprepared.discard(schedule)
            return prepared
        except BaseException:
            for stage in stages:
                stage._post_metadata_inference_cleanup()
            raise
        finally:
            for one, name in (
                (schedule, "_warmup_p2p"),
                *((s, n) for s in stages for n in ("_send_meta", "_recv_meta")),
            ):
                vars(one).pop(name, None)

    def _received(self, stage: Any, source: int) -> Any:
        """What stage number `source` would send to `stage` in the first step."""
        from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta

        rank = stage._resolve_peer_global_rank(source)
        try:
            shapes = ask_shapes(self._fabric, rank, asked=_name(stage, source))
            if source < stage.stage_index:
                return _StageForwardMeta(tensors_of(shapes.outputs))
            return _StageBackwardMeta(tensors_of(shapes.input_grads))
        except (KeepstepError, OSError) as error:
            self._why = f"rank {rank}: {error}"
            raise

    def _shapes(self, asked: StageAsked) -> StageShapes:
        """In the thread of a connection: what is known of one of the own stages."""
        for stage in list(self._stages):
            if asked == _name(stage, stage.stage_index):
                meta = stage._stage_meta
                try:
                    return StageShapes(shapes_of(meta.outputs), shapes_of(meta.input_grads))
                except StateError:
                    break
        return StageShapes()


def _name(stage: Any, number: int) -> StageAsked:
    """How members call stage `number` of the pipeline that `stage` belongs to; without a group it is over the world."""
    group = dist.group.WORLD if stage.group is None else stage.group
    return StageAsked(group.group_name, stage.num_stages, number)


def _flags(schedule: Any) -> dict[str, bool]:
    return {name: vars(schedule)[name] for name in _FLAGS if name in vars(schedule)}


def _vote_alone(stages: list[Any], has_backward: bool, *_: bool) -> None:
    """The own part of the vote: shapes are asked for if any of the own stages lacks its own."""
    from torch.distributed.pipelining._utils import InferenceMode

    dynamic = any(InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC if dynamic else InferenceMode.STATIC


@contextlib.contextmanager
def _buffers_kept(stages: list[Any]) -> Iterator[None]:
    """What the forward pass of a preparation does to buffers is taken back."""
    modules = [module for stage in stages for module in stage.submod.modules()]
    kept = [(module, name, buffer) for module in modules for name, buffer in module.named_buffers(recurse=False)]
    copies = [buffer.detach().clone() for *_, buffer in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), copy in zip(kept, copies, strict=True):
                buffer.copy_(copy)
                setattr(module, name, buffer)
