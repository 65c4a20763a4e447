"""How a membership change begins, or begins again with one more loss."""

from __future__ import annotations

from keepstep.control.job_state import Change, Loss
from keepstep.control.move_losses import interrupt_move, move_joiners
from keepstep.control.roster import Member, Status, live
from keepstep.control.turn import Turn
from keepstep.records.messages import Abort

__all__ = ["begin_change"]


def begin_change(turn: Turn, losses: tuple[Loss, ...], *, private: dict[int, dict[int, bytes]], why: str) -> None:
    """Start a change, or start it again with more losses: the generation grows, every stayer is told to stop.

    `private` is what each of the lost ranks last published of its own state, by version.
    """
    told = interrupt_move(turn, losses, why=why)
    state = turn.state
    old = state.change or Change(generation=state.generation, moved=turn.now, lost=())
    if state.change is None:
        turn.let(broken_standbys=0)
    change = Change(
        generation=state.newest_generation + 1,
        moved=turn.now,
        lost=(*old.lost, *losses),
        reached=old.reached,
        private=_with_private(old.private, private),
        bytes_moved=old.bytes_moved,
        renew=old.renew or state.move is not None,
        anew=old.anew,
    )
    turn.let(change=change, phase="changing", suspected={})
    turn.mark("detected", again=False)
    turn.mark("decided", again=False)
    if not told:
        turn.because(why)
    _tell_all(turn, change, why=why)


def _tell_all(turn: Turn, change: Change, *, why: str) -> None:
    """Everybody that may hold a state stops; joiners go on with what they do."""
    held = {m.rank for m in live(turn.state.members) if not m.joiner}  # by a leaver whose joiner was lost
    ranks = tuple(sorted({lost.rank for lost in change.lost if lost.rank >= 0} - held))
    order = Abort(turn.state.epoch, change.generation, ranks, renew=change.renew)
    for member in live(turn.state.members):
        if member.joiner:
            _keep_joiner(turn, member)
        else:
            if member.status is not Status.FINISHED:
                turn.put(member, status=Status.RUNNING)
            turn.tell(member, order, reason=why)
    for joiner in move_joiners(turn):
        turn.tell(joiner, order, reason=why)


def _with_private(known: dict[int, dict[int, bytes]], more: dict[int, dict[int, bytes]]) -> dict[int, dict[int, bytes]]:
    """Add what ranks published: versions that their earlier processes published stay known."""
    return {**known, **{rank: {**known.get(rank, {}), **private} for rank, private in more.items()}}


def _keep_joiner(turn: Turn, member: Member) -> None:
    """A joiner needs not stop: what it has copied may still be right; a checkpoint it loaded is not."""
    if member.ready and member.status is not Status.FETCHED:
        turn.put(member, status=Status.READY)
