"""Another controller goes on with a job whose state it has rebuilt from the journal."""

from __future__ import annotations

from keepstep.control.job_state import Event, TakeOver
from keepstep.control.turn import Turn

__all__ = ["on_take_over"]


def on_take_over(turn: Turn, event: Event) -> None:
    """Lead in the new epoch. All patience begins again: nobody could answer while nobody led."""
    fact = event.fact
    assert isinstance(fact, TakeOver)
    turn.let(epoch=fact.epoch, suspected=dict.fromkeys(turn.state.suspected, turn.now))
    turn.because(f"another controller took over in epoch {fact.epoch}")
    if turn.state.change is not None:
        turn.change(moved=turn.now)
    if turn.state.move is not None:
        turn.move()
    if turn.state.leaving:
        turn.let(leaving=turn.now)
    if turn.state.short:
        turn.let(short=turn.now)
    for member in turn.state.members.values():
        if member.error:
            turn.put(member, failed=turn.now)
        if member.released:
            turn.put(member, released=turn.now)
