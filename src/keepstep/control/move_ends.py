"""How a planned move ends: made, cancelled before anything changed, or dropped with everything else."""

from __future__ import annotations

from keepstep.control.move_state import Move
from keepstep.control.roster import Member, Status
from keepstep.control.starting import refill_standbys
from keepstep.control.turn import GRACE_S, Turn
from keepstep.records.move_messages import CancelMove, ReleaseMember
from keepstep.records.move_words import move_words
from keepstep.records.moves import MoveOutcome, MoveRecord

__all__ = ["cancel_move", "close_move", "complete_move", "discard_joiner", "drop_move", "release", "there"]

_AWAY = frozenset({Status.LEAVING, Status.FENCED, Status.GONE})


def there(turn: Turn, name: str) -> Member | None:
    """The process `name` if it is alive and may still take part."""
    member = turn.state.members.get(name)
    return None if member is None or member.status in _AWAY else member


def complete_move(turn: Turn) -> None:
    """The joiners are members: the leavers may go."""
    turn.mark_move("first_step")
    move = turn.move_under_way
    turn.let(
        generation=max(turn.state.generation, move.generation),
        version=max(turn.state.version, move.version),
    )
    for heir in move.heirs:
        joiner = turn.state.members[heir.joiner]
        status = Status.RUNNING if joiner.status is Status.READY else joiner.status
        turn.put(joiner, rank=heir.rank, heir_of=-1, moving=0, joiner=False, status=status)
        release(turn, heir.leaver, why=f"rank {heir.rank} has its new member")
    close_move(turn, move.ranks)
    if not any(member.status is Status.FINISHED for member in turn.state.members.values()):
        refill_standbys(turn, reason="a new standby in place of the one that joined")


def release(turn: Turn, name: str, *, why: str) -> None:
    """Let a leaver go, if it is there."""
    leaver, move = there(turn, name), turn.state.move
    if leaver is not None and move is not None:
        leaver = turn.put(leaver, status=Status.LEAVING, released=turn.now)
        turn.tell(leaver, ReleaseMember(turn.state.epoch, move.number, why), reason=why)


def discard_joiner(turn: Turn, name: str, *, why: str) -> None:
    """End a process that will not be a member, if it is there."""
    joiner = there(turn, name)
    if joiner is not None:
        turn.kill(turn.put(joiner, status=Status.FENCED), why, grace_s=GRACE_S)


def cancel_move(turn: Turn, why: str, *, keep: frozenset[str] = frozenset(), refill: bool = True) -> None:
    """Before any leaver may have committed: everybody drops what was prepared, training never stopped.

    Joiners in `keep` are not ended: they are kept for the ranks they were warmed up for, whose members are gone.
    Without `refill` nothing is started in place of the others yet.
    """
    move = turn.state.move
    if move is None:
        return
    for name in sorted((move.asked - move.joiners) | keep):
        member = there(turn, name)
        if member is not None:
            turn.tell(member, CancelMove(turn.state.epoch, move.number, why), reason=why)
    for name in sorted(move.joiners):
        if name not in keep:
            discard_joiner(turn, name, why=f"move {move.number} is not made")
        elif name in turn.state.members:
            turn.put(turn.state.members[name], moving=0)
    close_move(turn, (), why=why)
    if refill and turn.state.phase == "running":
        refill_standbys(turn, reason="a new standby in place of the one that was to join")


def drop_move(turn: Turn, why: str) -> None:
    """All processes end or start again: the move ends with them."""
    move = turn.state.move
    if move is not None:
        for name in sorted(move.joiners):
            discard_joiner(turn, name, why=why)
        close_move(turn, (), why=why)


def close_move(turn: Turn, moved: tuple[int, ...], *, why: str = "") -> None:
    """Write the record: the move is over, and the joiners have the ranks `moved`."""
    move = turn.move_under_way
    record = _record(turn, move, moved=moved, why=why)
    turn.moves.append(record)
    turn.because(move_words(record))
    turn.let(move=None)


def _record(turn: Turn, move: Move, *, moved: tuple[int, ...], why: str) -> MoveRecord:
    def at(name: str) -> float | None:
        return round(move.marks[name] - move.begun, 6) if name in move.marks else None

    outcome: MoveOutcome = "made" if moved == move.ranks else "partly made" if moved else "not made"
    slowest = max(move.pauses, key=lambda parts: sum(v for k, v in parts.items() if k.endswith("_s")), default={})
    return MoveRecord(
        job=turn.state.spec.job,
        attempt=turn.state.attempt,
        generation=move.generation,
        step=move.version if move.version >= 0 else None,
        wall=turn.now,
        number=move.number,
        outcome=outcome,
        ranks=move.ranks,
        moved=moved,
        leavers=tuple(heir.leaver for heir in move.heirs),
        joiners=tuple(heir.joiner for heir in move.heirs),
        origins=tuple(heir.origin for heir in move.heirs),
        nodes=tuple(heir.node for heir in move.heirs),
        why=why,
        refused=move.tries - 1 + bool(move.refused),
        pause=slowest,
        bytes_moved=move.bytes_moved,
        standby_s=at("standby"),
        warmed_s=at("warmed"),
        prepared_s=at("prepared"),
        committed_s=at("committed"),
        taken_s=at("taken"),
        first_step_s=at("first_step"),
    )
