"""What goes wrong with a planned move: somebody is lost, nobody answers, two processes have a claim to one rank.

Before a leaver may have committed, the move is cancelled and the loss repaired as always. From `CommitMove` on it is
not known here who has committed, so a loss stops everybody, and the members' answers decide who holds a rank that
moves: the leaver, if it did not commit; else the joiner, if it got the state; else the leaver, if it stands at the
version that all must come to; else the joiner takes the state from others, and if it is gone the rank is lost.
"""

from __future__ import annotations

import msgspec

from keepstep.control.job_state import Loss
from keepstep.control.move_ends import cancel_move, close_move, complete_move, discard_joiner, release, there
from keepstep.control.move_state import Heir, Move
from keepstep.control.roster import Member, Status, live
from keepstep.control.turn import Turn

__all__ = [
    "claimant",
    "drop_silent_joiners",
    "end_leavers",
    "interrupt_move",
    "kept_joiner",
    "lost_to_move",
    "move_joiners",
    "move_overdue",
    "settle_claims",
]

_COPY_PATIENCE = 5
"""Preparing holds a copy of the whole state beside training: it gets so many times the patience of an answer."""


def move_joiners(turn: Turn) -> list[Member]:
    """The joiners of the move under way that live."""
    move = turn.state.move
    found = [] if move is None else [there(turn, name) for name in sorted(move.joiners)]
    return [joiner for joiner in found if joiner is not None]


def claimant(member: Member) -> Member:
    """`member` as a loss sees it: a joiner of a move counts for the rank it was to take."""
    if not member.moving:
        return member
    return msgspec.structs.replace(member, rank=member.heir_of)


# ---------------------------------------------------------------- losses


def lost_to_move(turn: Turn, member: Member, *, how: str, done: bool) -> bool:
    """Deal with the end of a process that has to do with a move; True if nothing else follows from it.

    `member` is as it was before, `done` says that its script came to its end.
    """
    move = turn.state.move
    if member.status is Status.LEAVING:
        turn.because(f"{member.name} on {member.node}, which gave rank {member.rank} up, {how}")
        return True
    if move is None:
        return False
    if member.name in move.joiners and not move.committing:
        turn.let(broken_standbys=turn.state.broken_standbys + 1)
        cancel_move(turn, f"{member.name}, which was to take rank {member.heir_of}, {how}")
        return True
    if member.name in move.joiners and done:
        complete_move(turn)  # its script is at its end, so all joiners have their ranks, whatever they said of it
        return False
    if member.name in move.leavers and _taken(move, member.name):
        turn.because(f"{member.name} on {member.node} {how}: its rank {member.rank} was handed over before")
        return True
    return False


def _taken(move: Move, leaver: str) -> bool:
    return any(heir.leaver == leaver and heir.joiner in move.taken | move.stepped for heir in move.heirs)


def interrupt_move(turn: Turn, losses: tuple[Loss, ...], *, why: str) -> bool:
    """A change begins: a move that cannot have been committed anywhere is cancelled; the joiner of a lost leaver, which
    has run the set-up of that rank, is kept for it. True where a move was cancelled, which tells `why`."""
    move = turn.state.move
    if move is None or move.committing:
        return False
    lost = {loss.member for loss in losses}
    heirs = frozenset(heir.joiner for heir in move.heirs if heir.leaver in lost and there(turn, heir.joiner))
    cancel_move(turn, why, keep=heirs, refill=False)
    return True


def kept_joiner(turn: Turn, rank: int) -> Member | None:
    """The process that was warmed up for `rank` by a move that is over."""
    found = [m for m in turn.state.members.values() if m.heir_of == rank and not m.moving]
    return next((m for m in found if there(turn, m.name) is not None), None)


# ---------------------------------------------------------------- two claims to one rank


def settle_claims(turn: Turn) -> bool:
    """In a change that began in the commit of a move: when all have answered, decide who holds the ranks that moved.

    True once no claim is open.
    """
    move, change = turn.state.move, turn.state.change
    if move is None or change is None:
        return move is None
    joiners = move_joiners(turn)
    stayers = [m for m in live(turn.state.members) if not m.joiner]
    if any(m.answered != change.generation for m in (*stayers, *joiners)):
        return False
    voices = [m for m in (*stayers, *joiners) if m.version >= 0 and m.name not in move.committed]
    version = max((m.version + int(m.agreed) for m in voices), default=move.version)
    moved = tuple(heir.rank for heir in move.heirs if _award(turn, heir, version=version))
    close_move(turn, moved, why="; ".join(_whys(turn)))
    return True


def _whys(turn: Turn) -> list[str]:
    change = turn.state.change
    return [] if change is None else [f"{loss.member or 'a link'} was lost in its commit" for loss in change.lost]


def _award(turn: Turn, heir: Heir, *, version: int) -> bool:
    """Give one rank to whoever has the better claim; True if that is the joiner, with its state."""
    move = turn.move_under_way
    leaver, joiner = there(turn, heir.leaver), there(turn, heir.joiner)
    if joiner is not None and joiner.version >= 0:
        release(turn, heir.leaver, why=f"rank {heir.rank} has its new member")
        turn.put(joiner, rank=heir.rank, heir_of=-1, moving=0, joiner=False)
        return True
    if leaver is not None and (leaver.name not in move.committed or leaver.version == version):
        discard_joiner(turn, heir.joiner, why=f"rank {heir.rank} stays with {leaver.name}")
        turn.because(f"rank {heir.rank} stays with {leaver.name}")
        _note_joiner(turn, heir)
        return False
    release(turn, heir.leaver, why=f"rank {heir.rank} is past the state of its old member")
    if joiner is not None:
        turn.put(joiner, moving=0)
    return False


def _note_joiner(turn: Turn, heir: Heir) -> None:
    """Say in the incident of a lost joiner that its rank did not change hands."""
    change = turn.state.change
    note = f"{heir.joiner} was to take the rank in a planned move; it stays with {heir.leaver}"
    lost = () if change is None else change.lost
    replace = msgspec.structs.replace
    turn.change(lost=tuple(replace(loss, note=note) if loss.member == heir.joiner else loss for loss in lost))


# ---------------------------------------------------------------- time passes


def move_overdue(turn: Turn) -> Member | None:
    """Cancel a move that nobody can prepare in time; after the commit, the joiner that does not take its rank."""
    move, spec = turn.state.move, turn.state.spec
    if move is None or turn.state.change is not None:
        return None
    patience_s = spec.patience_s
    if not move.asked:
        patience_s = max(patience_s, 2 * turn.state.setup_s)
    elif not move.committing and move.leavers <= move.prepared:
        patience_s *= _COPY_PATIENCE
    if turn.now - move.moved <= patience_s:
        return None
    if not move.committing:
        cancel_move(turn, f"{_waited_for(turn, move)} within {patience_s:.0f} s")
        return None
    late = [joiner for joiner in move_joiners(turn) if joiner.name not in move.taken | move.stepped]
    return late[0] if late and move.committed else None


def _waited_for(turn: Turn, move: Move) -> str:
    if len(move.joiners) < len(move.heirs):
        return "no standby was warm"
    if not move.asked:
        names = [name for name in sorted(move.joiners) if not turn.state.members[name].ready]
        return f"{', '.join(names)} did not run the set-up"
    members = turn.state.members
    ranks = sorted(max(members[name].rank, members[name].heir_of) for name in move.asked - move.prepared)
    return f"ranks {ranks} did not prepare"


def drop_silent_joiners(turn: Turn) -> None:
    """A joiner of a move that does not say where it stands is given up before anybody else's patience ends."""
    change, spec = turn.state.change, turn.state.spec
    if turn.state.move is None or change is None or turn.now - change.moved <= spec.patience_s / 2:
        return
    for joiner in move_joiners(turn):
        if joiner.answered != change.generation:
            discard_joiner(turn, joiner.name, why=f"{joiner.name} does not say whether it took rank {joiner.heir_of}")


def end_leavers(turn: Turn) -> None:
    """End leavers by force that were released and do not end."""
    for member in turn.state.members.values():
        if member.status is Status.LEAVING and turn.now - member.released > turn.state.spec.patience_s:
            turn.kill(turn.put(member, released=turn.now), f"{member.name} was released and does not end", grace_s=0.0)
