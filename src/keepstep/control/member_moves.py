"""The member's machine at the commit of a planned move: what changes at that boundary without the controller.

`PrepareMove`, `CommitMove`, `CancelMove` and `TakeAddress` are for the threads beside the training loop and never come
to `member.obey`. When the vote at a boundary has passed, each member calls the function of its part here. A leaver then
waits in `member.obey` for `ReleaseMember`, or for the `Abort` of a change that may give it its rank back; `must_wait`
says so. A joiner without state answers an `Abort` with `Parked` of version -1.
"""

from __future__ import annotations

import msgspec

from keepstep.control.member import MemberState, Say
from keepstep.records.move_messages import MoveCommitted, MoveTaken

__all__ = ["hand_over", "may_take_over", "must_wait", "stay", "take_over"]


def must_wait(state: MemberState) -> bool:
    """True while a member may not leave its boundary by itself: a change is under way or its rank was handed over."""
    return state.answering >= 0 or state.leaving > 0


def stay(state: MemberState, generation: int) -> MemberState:
    """A stayer after the vote: it is in `generation` now, without a `Go`, and reports no first step in it."""
    return msgspec.structs.replace(state, generation=generation, fresh=False)


def hand_over(state: MemberState, number: int, generation: int) -> tuple[MemberState, Say]:
    """A leaver after the vote: say so before anything else; its own generation stays the old one, it steps no more."""
    return msgspec.structs.replace(state, leaving=number), Say(MoveCommitted(number, generation, state.version))


def may_take_over(state: MemberState) -> bool:
    """False once a joiner has answered an `Abort`: what comes from its leaver now comes too late."""
    return state.joiner and state.answering <= state.generation


def take_over(state: MemberState, taken: MoveTaken, generation: int) -> tuple[MemberState, Say]:
    """A joiner that holds the leaver's state: it is a member of `generation` and will report its first step."""
    state = msgspec.structs.replace(
        state,
        generation=generation,
        version=taken.version,
        target=None,
        answering=-1,
        joiner=False,
        fresh=True,
        whole=True,
    )
    return state, Say(taken)
