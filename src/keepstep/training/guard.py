"""The step guard: a step counts for all members or for none.

The agreement of a step is a small collective after all gradients are final (in a pre-hook of the optimizer). If it
passes, every live member can apply the update. If not, the members come to one version with the controller's help:
they roll forward where somebody saw it pass, else they redo the step from its start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import msgspec
import torch

from keepstep.control.member import (
    Act,
    LeaveJob,
    ListCheckpoints,
    LoadCheckpoint,
    MemberState,
    Place,
    PutBack,
    Refuse,
    Resolve,
    RunOn,
    Say,
    ShowMirrors,
    TakeCopy,
    TakeState,
    TellSettled,
    at_boundary,
    obey,
    step_kept,
)
from keepstep.control.member_moves import must_wait
from keepstep.records.messages import (
    Abort,
    Checkpoints,
    FirstStep,
    Order,
    Parked,
    PathsReady,
    Ready,
    ScriptFailed,
    Settled,
    TakePaths,
)
from keepstep.records.ring import MAX_PRIVATE_BYTES, SpanKind
from keepstep.training import private
from keepstep.training.agent_link import AgentLink
from keepstep.training.alike import Alike
from keepstep.training.checkup import Checkup
from keepstep.training.data import Batches
from keepstep.training.fabric import Fabric, Mode
from keepstep.training.failed_future import words_of
from keepstep.training.handover import Handover
from keepstep.training.injection import Injector
from keepstep.training.link_probe import LinkProbe
from keepstep.training.mirrors import MemberMirrors
from keepstep.training.moving import Moving
from keepstep.training.paths import PathPlan
from keepstep.training.pipelines import Pipelines
from keepstep.training.recorder import Recorder
from keepstep.training.rng import capture_rng, restore_rng
from keepstep.training.spans import Spans
from keepstep.training.state import TrackedState
from keepstep.training.step_recorder import StepRecorder
from keepstep.training.tiers import Tiers

__all__ = ["Guard", "StepAborted"]

_log = logging.getLogger("keepstep")

_ERROR_CHARACTERS = 500


class StepAborted(BaseException):
    """Unwinds the rest of a step that is done again; never reaches the user's handlers for `Exception`."""


class Guard:
    """Everything a protected member does at agreements and boundaries. Runs in the training thread only."""

    def __init__(self, fabric: Fabric, link: AgentLink, *, recorder: Recorder, state: MemberState) -> None:
        self.fabric = fabric
        self.link = link
        self.recorder = recorder
        self.spans = Spans(fabric)
        self.state = state
        self.tracked: TrackedState | None = None
        self.streams: list[Batches] = []
        self.tiers = Tiers()
        self.full = False
        self.agreed = False
        self.aborted = False
        self.rehearsing = False
        self._rng: dict[str, bytes] = {}
        self.replicas: dict[int, str] = {}
        self.drills = Injector(fabric, clock=recorder, report=link.say, modules=self._modules)
        self._checkup = Checkup(state.rank, say=link.say, now=recorder.monotonic_s)
        self._handover = Handover(fabric, link)
        self.drills.state_wire = self._handover.server
        self._moving = Moving(self, fabric, link=link, handover=self._handover, now=recorder.monotonic_s)
        self._pipelines = Pipelines(fabric)
        self.mirrors = MemberMirrors(fabric, link)
        self._alike = Alike(fabric)
        self.step_recorder = StepRecorder(fabric, say=link.say, now=recorder.monotonic_s)
        link.on_recording = self.step_recorder.obey
        self._renew = False
        self.spans.begin(SpanKind.SETUP)
        fabric.drills = self.drills
        link.take_drills(self.drills.order)
        link.on_abort = self._abort
        link.on_probe = LinkProbe(fabric, clock=recorder.monotonic_s, report=link.say).take
        link.on_paths = self._take_paths
        if link.pending():  # an abort that came before anybody listened
            fabric.poison()
        fabric.on_loss = self._handover.report_loss

    # -------------------------------------------------------------- the step

    def begin_step(self) -> None:
        """Keep what a redo needs, and tell the recorder which step this is."""
        self.agreed = self.aborted = self.fabric.exposed = False
        if not self.rehearsing:
            self.drills.begin_step(self.state.version)
        self.fabric.set_step(self.state.version)
        self.spans.end(SpanKind.SETUP)
        self.spans.begin(SpanKind.STEP)
        self.step_recorder.begin_step()
        for stream in self.streams:
            stream.begin_step(self.state.version, oldest=self.mirrors.oldest)
        self._rng = capture_rng()
        self._tracked().snapshot(full=self.full)
        self._pipelines.begin_step(rehearsing=self.rehearsing)
        if not self.rehearsing:
            self._alike.boundary(self.state.version, self._tracked())
            own = self._publish(self.state.version, counting=False)
            self.mirrors.boundary(self.state.version, self._tracked(), own=own)
            if self.full:
                self._copied()

    def keep_everything(self) -> None:
        """From here on steps are agreed at their end, and a redo takes weights and optimizer state back, too."""
        if not self.full:
            self.full = True
            self._copied()
            self._tracked().snapshot(full=True)

    def agree(self, *, updating: bool = False) -> None:
        """The agreement. Returns when the update may be applied (`updating`: it follows at once); raises StepAborted
        when the step is done again."""
        if not self.rehearsing:
            self._tracked().sync_buffers()
            self.publish(self.state.version + 1, counting=True)
            self._copied()
            with self.drills.waiting():
                passed = self.fabric.agreement()
                self.agreed = passed or self._park_at_agreement()
            if passed:
                self._alike.agreed()
            if self.agreed:
                self._moving.agreed(updating=updating)
        if not self.agreed:
            self.aborted = True
            raise StepAborted

    def check_rehearsal(self) -> None:
        """Raises StateError if a joiner that stands here could not make a member's next step."""
        self._pipelines.check()

    def redo(self) -> None:
        """Put everything back to the start of the step."""
        self.spans.end(SpanKind.STEP)
        self._tracked().restore()
        if self.rehearsing:
            self._pipelines.rehearsed(whole=self.aborted)
        else:
            self._pipelines.redo()
        for stream in self.streams:
            stream.redo()
        restore_rng(self._rng)

    def kept(self) -> None:
        """The update is applied: the step counts."""
        self.spans.end(SpanKind.STEP)
        self.fabric.exposed = True
        for stream in self.streams:
            stream.commit()
        self.state, act = step_kept(self.state)
        if act is not None:
            self._do(act)
        version = self.state.version
        if self._tracked().extras or self._tracked().own_buffers:  # the script may change them behind the agreement
            self._publish(version, counting=False)
        self.step_recorder.step_kept(self._tracked())
        self._checkup.kept(version, self._tracked())
        if self.tiers.due(version):
            with self.spans.span(SpanKind.CHECKPOINT):
                self._save(version)

    def drop_rest(self) -> None:
        """After an exception behind the update of a cut step: the step counts, its rest (zero_grad) did not run."""
        self._tracked().restore_gradients()

    def poisoned_and_undecided(self) -> bool:
        """True while an exception of the user's code belongs to a step that was aborted."""
        return not self.agreed and (self.aborted or self.rehearsing or self.poisoned)

    @property
    def poisoned(self) -> bool:
        """True from the abort of a step until the next generation is installed."""
        return self.fabric.mode is Mode.POISONED

    def resolve_aborted(self) -> None:
        """After an exception in an aborted step: wait for the verdict, which is to redo it, unless it came already."""
        if not (self.rehearsing or self.aborted):
            self._park_at_agreement()

    # -------------------------------------------------------------- the boundary

    def boundary(self, *, last: bool = False) -> None:
        """Between steps: answer what was asked, make what all make together, and wait while a membership change is on
        its way. `last`: there is no further step."""
        self.state, act = at_boundary(self.state)
        if act is not None:
            self._do(act)
        self._moving.boundary(last=last)
        while self.poisoned or must_wait(self.state) or self.link.pending():
            order = self.link.next_order()
            if order is None:
                self._moving.work()
                continue
            self.state, act = obey(self.state, order, place=Place.BOUNDARY)
            self._do(act)

    def finish(self) -> bool:
        """The agreement that all members have made their last step; False if a change came in between."""
        if self.fabric.agreement():
            return True
        self.boundary(last=True)
        return False

    def ask_for_checkpoint(self) -> None:
        """Before the first step all members agree on the checkpoint to start from."""
        self.state = msgspec.structs.replace(self.state, joiner=True)

    def tell_error(self, error: Exception) -> None:
        """The script is about to end with `error`; if no abort is under way it is the script's own."""
        if not self.rehearsing and not self.poisoned and not self.link.pending():
            self.link.say(ScriptFailed(self.state.version, words_of(error)[:_ERROR_CHARACTERS]))

    def close(self) -> None:
        """Write what is still to be written, and leave torch as it was."""
        self._pipelines.close()
        self.mirrors.close()
        self.tiers.close()

    # -------------------------------------------------------------- inside

    def _copied(self) -> None:
        """The state is about to change: wait until whoever copies it beside training has done so."""
        self.mirrors.settle()
        self.tiers.settle()

    def _tracked(self) -> TrackedState:
        assert self.tracked is not None
        return self.tracked

    def _modules(self) -> list[torch.nn.Module]:
        return [] if self.tracked is None else list(self.tracked.modules.values())

    def _abort(self, order: Order) -> None:
        """Runs in the link's thread: let go of every collective at once. Nobody lost means that links broke."""
        self._renew = isinstance(order, Abort) and (order.renew or not order.lost)
        self.fabric.poison()

    def _take_paths(self, order: TakePaths) -> None:
        """Runs in the link's thread: dial what the plan moves; training goes on meanwhile."""
        plan = PathPlan(order.number, order.dial, order.accept)
        self.fabric.prepare_paths(plan, ready=lambda why: self.link.say(PathsReady(order.number, why=why)))

    def _save(self, version: int) -> None:
        """A checkpoint. All members keep a step in the same generation, so its name tells courses of training apart."""
        written_in = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{self.fabric.generation}"
        own = self._private(version)
        self.tiers.save(version, self._tracked(), private=own, replicas=self.replicas, written_in=written_in)

    def _private(self, version: int, *, counting: bool = False, most: int | None = None) -> bytes:
        tracked = self._tracked()
        return private.capture(
            self.streams,
            counting=counting,
            version=version,
            extras=tracked.extras,
            buffers=tracked.own_buffers,
            most=most,
        )

    def publish(self, version: int, *, counting: bool) -> None:
        """Leave the rank's own state where it survives this process, and where it survives this node."""
        self._publish(version, counting=counting)

    def _publish(self, version: int, *, counting: bool) -> bytes:
        own = self._private(version, counting=counting, most=MAX_PRIVATE_BYTES)
        self.recorder.publish_private(version, own)
        self.mirrors.tell_private(version, own)
        return own

    def _park_at_agreement(self) -> bool:
        """Wait for the verdict about an aborted step: True to apply the update, False to redo the step."""
        while True:
            order = self.link.next_order()
            if order is None:
                continue
            self.state, act = obey(self.state, order, place=Place.AGREEMENT)
            if isinstance(act, Resolve):
                return act.forward
            self._do(act)

    def _do(self, act: Act) -> None:
        for kind, perform in self._performers:
            if isinstance(act, kind):
                perform(act)
                return

    @property
    def _performers(self) -> Sequence[tuple[type, Callable[..., None]]]:
        return (
            (Say, self._say),
            (TellSettled, self._tell_settled),
            (TakeState, self._take_state),
            (ShowMirrors, self._show_mirrors),
            (PutBack, self._put_back),
            (TakeCopy, lambda act: self.mirrors.take(act.order, self._tracked(), streams=self.streams)),
            (ListCheckpoints, self._list_checkpoints),
            (LoadCheckpoint, self._load_checkpoint),
            (RunOn, self._run_on),
            (LeaveJob, self._leave),
            (Refuse, lambda act: _log.debug("rank %d: %s", self.state.rank, act.why)),
        )

    def _say(self, act: Say) -> None:
        fact = act.fact
        if isinstance(fact, Ready):
            fact = Ready(fact.generation, self._tracked().replica_key(), self._pipelines.unprepared)
        assert isinstance(fact, (Ready, Parked, FirstStep))
        self.link.say(fact)

    def _tell_settled(self, act: TellSettled) -> None:
        image = self._handover.show(self._tracked())
        self.link.say(Settled(act.generation, act.version, image.digest, image.manifest.replica))

    def _take_state(self, act: TakeState) -> None:
        self._stop_moving()
        self._handover.take(act.order, self._tracked(), streams=self.streams)

    def _show_mirrors(self, act: ShowMirrors) -> None:
        newest = self.tiers.newest(self.state.version)
        self.mirrors.show(act.order, streams=self.streams, checkpoint=newest)

    def _put_back(self, act: PutBack) -> None:
        self._handover.hide()
        self._copied()
        self.mirrors.put_back(act.version, self._tracked(), streams=self.streams)
        self.publish(act.version, counting=False)
        self._tell_settled(TellSettled(act.generation, act.version))

    def _list_checkpoints(self, act: ListCheckpoints) -> None:
        self._copied()
        found = self.tiers.valid_steps(self.streams)
        self.link.say(Checkpoints(act.generation, found.steps, found.skipped, found.local, found.written_in))

    def _load_checkpoint(self, act: LoadCheckpoint) -> None:
        self._handover.hide()
        self.mirrors.forget()
        if act.version >= 0:
            tracked = self._tracked()
            own = self.tiers.load(act.version, tracked)
            private.apply(own, self.streams, extras=tracked.extras, buffers=tracked.own_buffers)
        self.publish(max(act.version, 0), counting=False)
        self._tell_settled(TellSettled(act.generation, max(act.version, 0)))

    def _stop_moving(self) -> None:
        self._moving.drop()
        self._moving.work()

    def _run_on(self, act: RunOn) -> None:
        self._stop_moving()
        self._handover.hide()
        self.replicas = dict(act.order.replicas)
        self.fabric.go_local()
        self._tracked().gradient_buckets.form()
        self._pipelines.run_on(act.order.version, anew=act.order.anew)
        self.fabric.install(act.order.generation, act.order.roster, renew=self._renew)
        self._renew = False
        self.mirrors.run_on(self.state.version)
        self.publish(self.state.version, counting=False)
        self._tracked().gradient_buckets.agree()

    def _leave(self, act: LeaveJob) -> None:
        raise SystemExit(act.code)
