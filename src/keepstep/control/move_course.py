"""A planned move, level-triggered: whatever happens, look at who is prepared and order what is possible next.

A warm process for each rank runs the script's set-up beside training; leavers say whom they have links with; joiners,
and the stayers among these peers, prepare; the leavers commit at a step boundary without a word from here. The first
step of the joiners completes it. What goes wrong is in `move_losses`.
"""

from __future__ import annotations

from functools import partial

from keepstep.control.answers import speaker
from keepstep.control.job_state import Event
from keepstep.control.mirror_sources import place_mirrors
from keepstep.control.move_ends import cancel_move, complete_move, there
from keepstep.control.move_plan import plan_move, plan_words
from keepstep.control.move_state import Heir, Move, MovePhase
from keepstep.control.outcome import BROKEN_STANDBYS
from keepstep.control.roster import Member, Status, by_rank, free_local_rank, live, standbys
from keepstep.control.starting import start_standby
from keepstep.control.turn import Turn
from keepstep.control.warming import warmth
from keepstep.errors import UsageError
from keepstep.records.address import Address
from keepstep.records.messages import Welcome
from keepstep.records.move_messages import (
    AskAddress,
    CommitMove,
    MoveCommitted,
    MovePrepared,
    MoveRefused,
    MoveTaken,
    PrepareMove,
    TakeAddress,
)
from keepstep.records.moves import MoveRequest

__all__ = [
    "advance_move",
    "on_ask_address",
    "on_move_committed",
    "on_move_prepared",
    "on_move_refused",
    "on_move_request",
    "on_move_taken",
]

_MOST_TRIES = 3

# ---------------------------------------------------------------- what is asked and answered


def on_move_request(turn: Turn, event: Event) -> None:
    """A person wants ranks moved. The shell has asked `plan_move` before, so that a mistake is answered there."""
    assert isinstance(event.fact, MoveRequest)
    try:
        heirs = plan_move(turn.state, event.fact)
    except UsageError as error:
        turn.because(f"no move: {error}")
        return
    number, generation = turn.state.moves + 1, turn.state.newest_generation + 1
    turn.let(moves=number, promised=generation, broken_standbys=0)
    turn.let(move=Move(number, generation, heirs, begun=turn.now, moved=turn.now, before=turn.state.generation))
    turn.because(plan_words(number, heirs))


def _heard(turn: Turn, event: Event, *, number: int) -> tuple[Member, Move] | None:
    """Who speaks and of which move; None if it is not for the one under way."""
    member, move = speaker(turn, event), turn.state.move
    return None if member is None or move is None or move.number != number else (member, move)


def on_move_prepared(turn: Turn, event: Event) -> None:
    """A member can commit, or cannot."""
    fact = event.fact
    assert isinstance(fact, MovePrepared)
    heard = _heard(turn, event, number=fact.number)
    if heard is None or heard[1].committing or heard[0].name not in heard[1].asked:
        return
    member, move = heard
    if fact.why:
        rank = member.rank if member.rank >= 0 else member.heir_of
        cancel_move(turn, f"{member.name} (rank {rank}) cannot prepare: {fact.why}")
        return
    peers = move.peers | set(fact.peers) if member.name in move.leavers else move.peers
    moved = move.bytes_moved + fact.bytes_moved
    turn.move(prepared=move.prepared | {member.name}, peers=peers, bytes_moved=moved)


def on_move_refused(turn: Turn, event: Event) -> None:
    """The vote failed: tried again when all leavers have said so, and rolled back in the end.

    A leaver may be heard late, about a vote whose next one has passed.
    """
    fact = event.fact
    assert isinstance(fact, MoveRefused)
    heard = _heard(turn, event, number=fact.number)
    if heard is None or not heard[1].committing or heard[1].committed or heard[0].name not in heard[1].leavers:
        return
    if fact.failed != heard[1].tries:
        return
    move = turn.move(refused=heard[1].refused | {heard[0].name})
    turn.because(f"the vote of move {move.number} failed at version {fact.version}: {fact.why}")
    if turn.state.change is not None or move.refused != move.leavers:
        return
    if move.tries >= _MOST_TRIES:
        cancel_move(turn, f"the vote failed {move.tries} times, last: {fact.why}")
        return
    move = turn.move(refused=frozenset(), tries=move.tries + 1)
    _order_commit(turn, move)


def on_move_committed(turn: Turn, event: Event) -> None:
    """A leaver has seen the vote pass: all others are in the new generation, or about to see it."""
    fact = event.fact
    assert isinstance(fact, MoveCommitted)
    heard = _heard(turn, event, number=fact.number)
    if heard is None or heard[0].name not in heard[1].leavers:
        return
    move = turn.move(committed=heard[1].committed | {heard[0].name}, version=fact.version)
    turn.let(generation=max(turn.state.generation, move.generation), version=max(turn.state.version, fact.version))
    turn.mark_move("committed")


def on_move_taken(turn: Turn, event: Event) -> None:
    """A joiner holds the state and its rank."""
    fact = event.fact
    assert isinstance(fact, MoveTaken)
    heard = _heard(turn, event, number=fact.number)
    if heard is None or heard[0].name not in heard[1].joiners:
        return
    move = turn.move(taken=heard[1].taken | {heard[0].name}, pauses=(*heard[1].pauses, dict(fact.parts)))
    if move.taken == move.joiners:
        turn.mark_move("taken")


def on_ask_address(turn: Turn, event: Event) -> None:
    """A member that had no link with a leaver needs its rank now."""
    fact = event.fact
    assert isinstance(fact, AskAddress)
    member, move, state = speaker(turn, event), turn.state.move, turn.state
    if member is None or (state.change is not None and not state.change.going):
        return
    holder, generation = by_rank(state.members).get(fact.rank), state.generation
    if move is not None and move.committing and fact.rank in move.ranks:
        heir = move.heirs[move.ranks.index(fact.rank)]
        holder, generation = state.members[heir.joiner], move.generation
    if holder is not None and holder.address is not None:
        order = TakeAddress(state.epoch, fact.rank, holder.address, generation)
        turn.tell(member, order, reason=f"it asks for rank {fact.rank}")


# ---------------------------------------------------------------- what is possible next


def advance_move(turn: Turn) -> None:
    """Order whatever the present state of the move allows."""
    move, state = turn.state.move, turn.state
    if move is None or state.change is not None or state.exit_code is not None:
        return
    if _at_the_end(turn, move):
        cancel_move(turn, "the job has made its last step")
    elif move.phase is MovePhase.FINDING:
        _find_joiners(turn)
    elif move.phase is MovePhase.LEAVERS:
        if move.leavers <= move.prepared:
            _ask_others(turn, move)
    elif move.phase is MovePhase.PREPARING:
        if move.asked <= move.prepared:
            turn.mark_move("prepared")
            _order_commit(turn, turn.move(phase=MovePhase.COMMITTING))
    elif move.stepped == move.joiners:
        complete_move(turn)
        place_mirrors(turn, turn.state.generation)


def _at_the_end(turn: Turn, move: Move) -> bool:
    """True if no boundary is left to commit at. In mid-commit only the leavers' own word says so."""
    ended = {m.rank for m in live(turn.state.members) if m.status is Status.FINISHED} | turn.state.done_ranks
    if not move.committing:
        return bool(ended)
    return not move.stepped and any(h.rank in ended and h.leaver not in move.committed for h in move.heirs)


def _find_joiners(turn: Turn) -> None:
    """Welcome a warm process for each rank, start what is missing, go on when all have run their set-up."""
    move = turn.move_under_way
    gone = {node.name for node in turn.state.nodes if node.gone} & {heir.node for heir in move.heirs}
    if gone:
        cancel_move(turn, f"node {', '.join(sorted(gone))} is lost")
        return
    waiting = standbys(turn.state.members, Status.WARM)
    for heir in move.heirs:
        warm = [] if heir.joiner else [m for m in waiting if m.node == heir.node]
        if warm:
            chosen = min(warm, key=partial(warmth, turn.state, rank=heir.rank))
            waiting.remove(chosen)
            _welcome(turn, heir, standby=chosen)
    missing = [heir.node for heir in turn.move_under_way.heirs if not heir.joiner]
    for node in sorted(set(missing)):
        coming = [m for m in standbys(turn.state.members, Status.STARTING) if m.node == node]
        for _ in range(missing.count(node) - len(coming)):
            if turn.state.broken_standbys >= BROKEN_STANDBYS:
                cancel_move(
                    turn, f"{BROKEN_STANDBYS} processes that should join on {node} ended at once: see their logs"
                )
                return
            start_standby(turn, node, reason=f"no standby is left on {node} for move {move.number}")
    if missing:
        return
    turn.mark_move("standby")
    if all(turn.state.members[name].ready for name in turn.move_under_way.joiners):
        turn.mark_move("warmed")
        _ask_leavers(turn)


def _welcome(turn: Turn, heir: Heir, *, standby: Member) -> None:
    """Its roster has the living leavers of the other ranks: what it must know of their state it asks them."""
    move, state = turn.move_under_way, turn.state
    local_rank = free_local_rank(state.members, standby.node)
    joiner = turn.put(
        standby, heir_of=heir.rank, moving=move.number, local_rank=local_rank, status=Status.JOINING, joiner=True
    )
    chosen = Heir(heir.rank, heir.leaver, heir.origin, heir.node, joiner.name)
    turn.move(heirs=tuple(chosen if other.rank == heir.rank else other for other in move.heirs))
    own = {rank: address for rank, address in _new_addresses(turn).items() if rank == heir.rank}
    order = Welcome(
        epoch=state.epoch,
        rank=heir.rank,
        world=state.spec.world,
        local_rank=local_rank,
        generation=state.generation,
        attempt=state.attempt,
        joiner=True,
        roster=turn.addresses() | own,
        secret=state.spec.secret,
        move=move.number,
    )
    turn.tell(joiner, order, reason=f"standby {joiner.name} is to take rank {heir.rank} in move {move.number}")


def _new_addresses(turn: Turn) -> dict[int, Address]:
    """Where the moving ranks will be reached."""
    members = turn.state.members
    found = {h.rank: members[h.joiner].address for h in turn.move_under_way.heirs if h.joiner}
    return {rank: address for rank, address in found.items() if address is not None}


def _ask_leavers(turn: Turn) -> None:
    move = turn.move(phase=MovePhase.LEAVERS)
    ranks = _new_addresses(turn)
    for heir in move.heirs:
        _prepare(turn, heir.leaver, order=PrepareMove(turn.state.epoch, move.number, move.generation, "leave", ranks))


def _ask_others(turn: Turn, move: Move) -> None:
    """Joiners first, so that they know the move when a stayer calls."""
    ranks, epoch = _new_addresses(turn), turn.state.epoch
    roster = {**turn.addresses(), **ranks}
    turn.move(phase=MovePhase.PREPARING)
    for heir in move.heirs:
        leaver = turn.state.members[heir.leaver].address
        order = PrepareMove(epoch, move.number, move.generation, "join", ranks, roster=roster, leaver=leaver)
        _prepare(turn, heir.joiner, order=order)
    place_mirrors(turn, move.generation, heirs=[turn.state.members[heir.joiner] for heir in move.heirs])
    for rank in sorted(move.peers - set(move.ranks)):
        member = by_rank(turn.state.members).get(rank)
        if member is not None:
            _prepare(turn, member.name, order=PrepareMove(epoch, move.number, move.generation, "stay", ranks))


def _prepare(turn: Turn, name: str, *, order: PrepareMove) -> None:
    member = turn.state.members[name]
    turn.move(asked=turn.move_under_way.asked | {name})
    turn.tell(member, order, reason=f"move {order.number}: prepare to {order.part}")


def _order_commit(turn: Turn, move: Move) -> None:
    for name in sorted(move.leavers):
        leaver = there(turn, name)
        if leaver is not None:
            reason = f"move {move.number}: commit" + (f", try {move.tries}" if move.tries > 1 else "")
            turn.tell(leaver, CommitMove(turn.state.epoch, move.number, failed=move.tries - 1), reason=reason)
