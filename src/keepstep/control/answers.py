"""What the job machine does with the answers of members: each handler notes one fact; `reconcile` does the rest."""

from __future__ import annotations

from keepstep.control.job_state import Change, Event
from keepstep.control.mirror_sources import place_mirrors, refuse_mirror
from keepstep.control.outcome import end_job
from keepstep.control.roster import Member, Status, live
from keepstep.control.strangers import misfit, refuse_standby, refuse_strangers
from keepstep.control.turn import Turn
from keepstep.control.warming import ask_to_record
from keepstep.records.domain_messages import StateKept
from keepstep.records.messages import (
    Checkpoints,
    Fence,
    Fetched,
    FetchFailed,
    Finished,
    FirstStep,
    Hello,
    Parked,
    Ready,
    ScriptFailed,
    Settled,
    Welcome,
)

__all__ = [
    "on_checkpoints",
    "on_fetch_failed",
    "on_fetched",
    "on_finished",
    "on_first_step",
    "on_hello",
    "on_parked",
    "on_ready",
    "on_script_failed",
    "on_settled",
    "on_state_kept",
    "speaker",
]


def speaker(turn: Turn, event: Event) -> Member | None:
    """The member that speaks, if it may: a fenced one is told to go, an unknown one is not heard."""
    member = turn.state.members.get(event.source_member)
    if member is None or member.status is Status.GONE:
        return None
    if member.status is Status.FENCED:
        turn.tell(member, Fence(turn.state.epoch, "your rank was given to another member"), reason="fenced")
        return None
    return member


def _current(turn: Turn, generation: int) -> Change | None:
    """The change on its way, if the answer is for its generation and still waited for."""
    change = turn.state.change
    return change if change is not None and change.generation == generation and not change.going else None


def on_hello(turn: Turn, event: Event) -> None:
    """A process called join(): keep it until all have, then welcome all; a standby waits warm."""
    fact = event.fact
    assert isinstance(fact, Hello)
    member = speaker(turn, event)
    if member is None or member.status is not Status.STARTING:
        return
    why = misfit(turn, fact)
    if member.rank < 0 and why:
        refuse_standby(turn, member, why=why)
    elif why:
        remedy = ": install the same version everywhere" if "keepstep" in why else ""
        end_job(turn, 76, why=f"rank {member.rank} {why}{remedy}")
    elif member.rank < 0:
        turn.put(member, status=Status.WARM, address=fact.address, torch_version=fact.torch_version)
        turn.because(f"standby {member.name} is warm")
    else:
        turn.put(member, status=Status.CONNECTED, address=fact.address, torch_version=fact.torch_version)
        _welcome_when_all(turn)


def _welcome_when_all(turn: Turn) -> None:
    state = turn.state
    members = live(state.members)
    if len(members) < state.spec.world or any(m.status is not Status.CONNECTED for m in members):
        return
    roster = turn.addresses()
    turn.let(phase="running", welcomed=turn.now)
    ask_to_record(turn, members)
    for member in members:
        running = turn.put(member, status=Status.RUNNING)
        order = Welcome(
            epoch=state.epoch,
            rank=member.rank,
            world=state.spec.world,
            local_rank=member.local_rank,
            generation=state.generation,
            attempt=state.attempt,
            joiner=False,
            roster=roster,
            secret=state.spec.secret,
        )
        turn.tell(running, order, reason="all members are here")
    place_mirrors(turn, state.generation)
    turn.because(f"all {len(members)} members are here")
    turn.let(torch_version=members[0].torch_version)
    refuse_strangers(turn)


def on_parked(turn: Turn, event: Event) -> None:
    """A stayer stopped for the change."""
    fact = event.fact
    assert isinstance(fact, Parked)
    member = speaker(turn, event)
    if member is None or _current(turn, fact.generation) is None or member.answered == fact.generation:
        return
    if member.joiner and not member.moving:
        return
    turn.put(member, status=Status.PARKED, answered=fact.generation, version=fact.version, agreed=fact.agreed)


def on_settled(turn: Turn, event: Event) -> None:
    """A member stands at a step boundary with the ordered version."""
    fact = event.fact
    assert isinstance(fact, Settled)
    member = speaker(turn, event)
    change = _current(turn, fact.generation)
    if member is None or change is None or fact.version != change.version:
        return
    turn.put(
        member,
        status=Status.SETTLED,
        answered=fact.generation,
        version=fact.version,
        agreed=False,
        digest=fact.digest,
        replica=fact.replica,
    )


def on_ready(turn: Turn, event: Event) -> None:
    """A joiner can take state; or a member of a fresh attempt asks which checkpoint to start from."""
    fact = event.fact
    assert isinstance(fact, Ready)
    member = speaker(turn, event)
    change = turn.state.change
    if member is None:
        return
    if member.joiner:
        turn.put(member, status=Status.READY, replica=fact.replica, ready=True, unprepared=fact.unprepared)
        if member.moving:
            turn.move()
        else:
            turn.mark("warmed", rank=member.rank)
    elif change is None or change.initial:
        turn.put(member, status=Status.READY, replica=fact.replica)
        if change is None:
            generation = turn.state.newest_generation + 1
            turn.let(change=Change(generation=generation, moved=turn.now, lost=(), version=0, initial=True))
            turn.because("the members ask which checkpoint to start from")


def on_state_kept(turn: Turn, event: Event) -> None:
    """In passing: which members hold the same state, before any loss asks for it."""
    fact = event.fact
    assert isinstance(fact, StateKept)
    member = turn.state.members.get(event.source_member)
    if member is not None and member.rank == fact.rank and member.replica != fact.replica:
        turn.put(member, replica=fact.replica)


def on_fetched(turn: Turn, event: Event) -> None:
    """A joiner holds the state."""
    fact = event.fact
    assert isinstance(fact, Fetched)
    member = speaker(turn, event)
    change = _current(turn, fact.generation)
    if member is None or change is None or member.name not in change.fetching:
        return
    turn.put(member, status=Status.FETCHED, version=fact.version, digest=fact.digest)
    turn.change(bytes_moved=change.bytes_moved + fact.bytes_moved, fetching=change.fetching - {member.name})


def on_fetch_failed(turn: Turn, event: Event) -> None:
    """A joiner lost all its sources. Their agents report losses; with the next tick it is sent again."""
    fact = event.fact
    assert isinstance(fact, FetchFailed)
    member = speaker(turn, event)
    change = _current(turn, fact.generation)
    if member is None or change is None:
        return
    turn.because(f"rank {member.rank} could not take the state: {fact.why}")
    if not refuse_mirror(turn, member):
        turn.change(failed=change.failed | {member.name})


def on_checkpoints(turn: Turn, event: Event) -> None:
    """A member says which checkpoints it could load."""
    fact = event.fact
    assert isinstance(fact, Checkpoints)
    member = speaker(turn, event)
    if member is None or _current(turn, fact.generation) is None:
        return
    turn.put(member, checkpoints=fact.steps, local=fact.local, written_in=fact.written_in)
    for skipped in fact.skipped:
        turn.because(f"rank {member.rank} skips {skipped}")


def on_first_step(turn: Turn, event: Event) -> None:
    """A member completed its first step in the new generation (or the first of all)."""
    fact = event.fact
    assert isinstance(fact, FirstStep)
    member = speaker(turn, event)
    if member is not None and member.moving:
        _joiner_stepped(turn, member, generation=fact.generation)
    if member is None or fact.generation != turn.state.generation or member.moving:
        return
    turn.let(version=max(turn.state.version, fact.version))
    change = turn.state.change
    if change is not None and change.going:
        turn.change(first_steps=change.first_steps | {member.name})
    elif change is None:
        turn.let(setup_s=max(turn.state.setup_s, turn.now - turn.state.welcomed))


def _joiner_stepped(turn: Turn, member: Member, *, generation: int | None = None) -> None:
    """The joiner of a move has made a step, or its last one: it holds its rank for good."""
    move = turn.state.move
    if move is not None and generation in (None, move.generation):
        turn.move(stepped=move.stepped | {member.name})


def on_finished(turn: Turn, event: Event) -> None:
    """A member has left its last step."""
    fact = event.fact
    assert isinstance(fact, Finished)
    member = speaker(turn, event)
    if member is not None:
        turn.let(version=max(turn.state.version, fact.version))
        turn.put(member, status=Status.FINISHED, version=fact.version, weights_sha256=fact.weights_sha256)
        if member.moving:
            _joiner_stepped(turn, member)


def on_script_failed(turn: Turn, event: Event) -> None:
    """The script of a member raised an error of its own: its exit, which follows, is no fault of the machine."""
    fact = event.fact
    assert isinstance(fact, ScriptFailed)
    member = speaker(turn, event)
    if member is not None:
        turn.put(member, error=fact.error, failed=turn.now)
