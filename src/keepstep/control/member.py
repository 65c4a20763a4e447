"""The member's side of a membership change: which answer an order gets at which place in the step. Pure.

The training process runs this machine at the two places where it may stop: at the agreement of a step that was
aborted, and at the boundary between steps. The simulator runs the same code.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from keepstep.records.messages import (
    Abort,
    Fact,
    Fence,
    Fetch,
    Find,
    FirstStep,
    Go,
    Order,
    Parked,
    Ready,
    Restore,
    Settle,
    Stop,
)
from keepstep.records.mirror_messages import AskMirrors, Return, TakeMirror
from keepstep.records.move_messages import ReleaseMember

__all__ = [
    "Act",
    "LeaveJob",
    "ListCheckpoints",
    "LoadCheckpoint",
    "MemberState",
    "Place",
    "PutBack",
    "Refuse",
    "Resolve",
    "RunOn",
    "Say",
    "ShowMirrors",
    "TakeCopy",
    "TakeState",
    "TellSettled",
    "at_boundary",
    "obey",
    "step_kept",
]


class Place(Enum):
    """Where the training process stands: at an agreement that did not pass, or between steps."""

    AGREEMENT = "agreement"
    BOUNDARY = "boundary"


class MemberState(msgspec.Struct, frozen=True):
    """What a member knows. `version` counts applied updates; `target` is set between `Settle` and the boundary.

    `answering` is the generation of the change being answered, `fresh` says that no first step of the present
    generation was reported yet, `joiner` that its own state is not the job's. `whole` says that its set-up cannot have
    been spoiled by an abort: it has taken part in an agreement or has run on in some generation. `leaving` is the
    number of the move in which it handed its rank over (0: none).
    """

    rank: int
    generation: int
    epoch: int = 0
    version: int = 0
    target: int | None = None
    answering: int = -1
    joiner: bool = False
    fresh: bool = True
    whole: bool = False
    leaving: int = 0


class Say(msgspec.Struct, frozen=True):
    """Send a fact to the controller."""

    fact: Fact


class TellSettled(msgspec.Struct, frozen=True):
    """Send `Settled` with the digest of the state as it is now."""

    generation: int
    version: int


class Resolve(msgspec.Struct, frozen=True):
    """Leave the agreement: apply the update if `forward`, else redo the step from its start."""

    forward: bool


class TakeState(msgspec.Struct, frozen=True):
    """Copy the state from the sources of the order."""

    order: Fetch


class ShowMirrors(msgspec.Struct, frozen=True):
    """Say which copies of states are in this member's memory."""

    order: AskMirrors


class PutBack(msgspec.Struct, frozen=True):
    """Put the own copy of `version` back, then tell `Settled`."""

    generation: int
    version: int


class TakeCopy(msgspec.Struct, frozen=True):
    """Take the mirror that the order names."""

    order: TakeMirror


class ListCheckpoints(msgspec.Struct, frozen=True):
    """Look which checkpoints could be loaded and say so."""

    generation: int


class LoadCheckpoint(msgspec.Struct, frozen=True):
    """Load the checkpoint of `version` (-1: keep the initial state), then tell `Settled`."""

    generation: int
    version: int


class RunOn(msgspec.Struct, frozen=True):
    """Install the new generation and go on."""

    order: Go


class LeaveJob(msgspec.Struct, frozen=True):
    """Exit with `code` and change nothing any more."""

    code: int
    why: str


class Refuse(msgspec.Struct, frozen=True):
    """Do nothing: the order comes from a deposed leader or is not for this place."""

    why: str


_MirrorAct = ShowMirrors | PutBack | TakeCopy
Act = (
    Say | TellSettled | Resolve | TakeState | _MirrorAct | ListCheckpoints | LoadCheckpoint | RunOn | LeaveJob | Refuse
)


def obey(state: MemberState, order: Order, *, place: Place) -> tuple[MemberState, Act]:
    """The new state and what to do about `order` at `place`.

    An order with a lower leader epoch than one seen before is refused, and so is one of an older generation than that
    which is answered. A step that is agreed rolls forward and one that is not is redone: `Settle.version` decides
    between the two for a member that waits at an agreement.
    """
    epoch = getattr(order, "epoch", 0)
    if epoch < state.epoch:
        return state, Refuse(f"order of leader epoch {epoch}, {state.epoch} was seen already")
    state = msgspec.structs.replace(state, epoch=epoch)
    if isinstance(order, (Fence, Stop)):
        return state, LeaveJob(76 if isinstance(order, Fence) else order.code, order.why)
    if isinstance(order, ReleaseMember):
        return state, _released(state, order)
    generation = getattr(order, "generation", state.generation)
    if generation < max(state.generation, state.answering):
        return state, Refuse(f"{type(order).__name__} of generation {generation} is out of date")
    if isinstance(order, Abort):
        return _parked(state, order, place=place)
    if isinstance(order, Settle):
        return _settle(state, order, place=place)
    if place is Place.AGREEMENT:
        return state, Refuse(f"{type(order).__name__} is for members between steps")
    return _between_steps(state, order)


def _released(state: MemberState, order: ReleaseMember) -> Act:
    if state.leaving == order.number:
        return LeaveJob(0, order.why)
    return Refuse(f"move {order.number} did not take the rank of this member")


def _parked(state: MemberState, order: Abort, *, place: Place) -> tuple[MemberState, Act]:
    """A member that was still in its set-up when the abort came holds no state: it says version -1."""
    whole = state.whole or place is Place.AGREEMENT
    state = msgspec.structs.replace(state, answering=order.generation, target=None, whole=whole)
    version = state.version if whole else -1
    return state, Say(Parked(order.generation, version, agreed=False, boundary=place is Place.BOUNDARY))


def _settle(state: MemberState, order: Settle, *, place: Place) -> tuple[MemberState, Act]:
    ahead = order.version - state.version
    if order.generation != state.answering or ahead < 0 or ahead > (place is Place.AGREEMENT):
        return state, Refuse(f"cannot come to version {order.version} from {state.version} at the {place.value}")
    state = msgspec.structs.replace(state, target=order.version)
    if place is Place.AGREEMENT:
        return state, Resolve(forward=ahead == 1)
    return msgspec.structs.replace(state, target=None), TellSettled(order.generation, state.version)


def _between_steps(state: MemberState, order: Order) -> tuple[MemberState, Act]:
    if isinstance(order, Fetch):
        return state, TakeState(order)
    if isinstance(order, AskMirrors):
        return state, ShowMirrors(order)
    if isinstance(order, Return):
        return msgspec.structs.replace(state, version=order.version), PutBack(order.generation, order.version)
    if isinstance(order, TakeMirror):
        return state, TakeCopy(order)
    if isinstance(order, Find):
        return msgspec.structs.replace(state, answering=order.generation), ListCheckpoints(order.generation)
    if isinstance(order, Restore):
        state = msgspec.structs.replace(state, version=max(order.version, 0), answering=order.generation)
        return state, LoadCheckpoint(order.generation, order.version)
    if isinstance(order, Go):
        state = msgspec.structs.replace(
            state,
            generation=order.generation,
            version=order.version,
            target=None,
            answering=-1,
            joiner=False,
            fresh=True,
            whole=True,
            leaving=0,
        )
        return state, RunOn(order)
    return state, Refuse(f"{type(order).__name__} is not for a member")


def at_boundary(state: MemberState) -> tuple[MemberState, Act | None]:
    """What a member says by itself when it comes to a boundary: a joiner is ready, a settling one has settled."""
    if state.joiner and state.answering < 0:
        state = msgspec.structs.replace(state, answering=state.generation)
        return state, Say(Ready(state.generation, replica=""))
    if state.target is not None:
        state = msgspec.structs.replace(state, target=None)
        return state, TellSettled(state.answering, state.version)
    return state, None


def step_kept(state: MemberState) -> tuple[MemberState, Act | None]:
    """One more update is applied; the first one of a generation is reported."""
    state = msgspec.structs.replace(state, version=state.version + 1, whole=True)
    if not state.fresh or state.target is not None:
        return state, None
    state = msgspec.structs.replace(state, fresh=False)
    return state, Say(FirstStep(state.generation, state.version))
