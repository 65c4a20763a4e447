"""What the job machine does with the answers of members: each handler notes one fact; `reconcile` does the rest."""

from __future__ import annotations

from keepstep.control.job_state import Change, Event
from keepstep.control.roster import Member, Status, live
from keepstep.control.turn import Turn
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
    "on_settled",
]


def _speaker(turn: Turn, event: Event) -> Member | None:
    """The member that speaks, if it may: a fenced or unknown one is told to go."""
    member = turn.state.members.get(event.source_member)
    if member is None or member.status is Status.GONE:
        return None
    if member.status is Status.FENCED:
        turn.tell(member, Fence(turn.state.epoch, "your rank was given to another member"), "fenced")
        return None
    return member


def _current(turn: Turn, generation: int) -> Change | None:
    """The change on its way, if the answer is for its generation."""
    change = turn.state.change
    return change if change is not None and change.generation == generation else None


def on_hello(turn: Turn, event: Event) -> None:
    """A process called join(): keep it until all have, then welcome all; a standby waits warm."""
    fact = event.fact
    assert isinstance(fact, Hello)
    member = _speaker(turn, event)
    if member is None or turn.state.exit_code is not None:
        return
    spec = turn.state.spec
    if fact.keepstep_version != spec.keepstep_version:
        turn.end(
            76,
            f"{_name(member)} runs keepstep {fact.keepstep_version}, the controller {spec.keepstep_version}: "
            "install the same version everywhere",
        )
    elif fact.world != spec.world:
        turn.end(76, f"{_name(member)} believes in a world of {fact.world}, the job has {spec.world} ranks")
    elif member.rank < 0:
        turn.put(member, status=Status.WARM, address=fact.address)
        turn.because(f"standby {member.name} is warm")
    else:
        turn.put(member, status=Status.CONNECTED, address=fact.address)
        _welcome_when_all(turn)


def _name(member: Member) -> str:
    return f"rank {member.rank}" if member.rank >= 0 else f"standby {member.name}"


def _welcome_when_all(turn: Turn) -> None:
    members = live(turn.state.members)
    if len(members) < turn.state.spec.world or any(m.status is not Status.CONNECTED for m in members):
        return
    roster = turn.addresses()
    turn.let(phase="running")
    local: dict[str, int] = {}
    for member in members:
        running = turn.put(member, status=Status.RUNNING)
        order = Welcome(
            epoch=turn.state.epoch,
            rank=member.rank,
            world=turn.state.spec.world,
            local_rank=local.get(member.node, 0),
            generation=turn.state.generation,
            attempt=turn.state.attempt,
            joiner=False,
            roster=roster,
            secret=turn.state.spec.secret,
        )
        local[member.node] = local.get(member.node, 0) + 1
        turn.tell(running, order, "all members are here")
    turn.because(f"all {len(members)} members are here")


def on_parked(turn: Turn, event: Event) -> None:
    """A stayer stopped for the change."""
    fact = event.fact
    assert isinstance(fact, Parked)
    member = _speaker(turn, event)
    if member is None or _current(turn, fact.generation) is None or member.joiner:
        return
    turn.put(member, status=Status.PARKED, answered=fact.generation, version=fact.version, agreed=fact.agreed)


def on_settled(turn: Turn, event: Event) -> None:
    """A member stands at a step boundary with the ordered version."""
    fact = event.fact
    assert isinstance(fact, Settled)
    member = _speaker(turn, event)
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
    member = _speaker(turn, event)
    if member is None:
        return
    turn.put(member, status=Status.READY, replica=fact.replica)
    if member.joiner:
        turn.mark("connected", again=True)
    elif turn.state.change is None:
        turn.let(change=Change(generation=turn.state.generation + 1, began=turn.now, lost=(), initial=True, version=0))
        turn.because("the members ask which checkpoint to start from")


def on_fetched(turn: Turn, event: Event) -> None:
    """A joiner holds the state."""
    fact = event.fact
    assert isinstance(fact, Fetched)
    member = _speaker(turn, event)
    change = _current(turn, fact.generation)
    if member is None or change is None:
        return
    turn.put(member, status=Status.FETCHED, version=fact.version, digest=fact.digest)
    turn.change(bytes_moved=change.bytes_moved + fact.bytes_moved)


def on_fetch_failed(turn: Turn, event: Event) -> None:
    """A joiner lost all its sources; the loss of the sources themselves is reported by their agents."""
    fact = event.fact
    assert isinstance(fact, FetchFailed)
    member = _speaker(turn, event)
    change = _current(turn, fact.generation)
    if member is None or change is None:
        return
    turn.put(member, status=Status.READY)
    turn.change(fetching=change.fetching - {member.name})
    turn.because(f"rank {member.rank} could not take the state: {fact.why}")


def on_checkpoints(turn: Turn, event: Event) -> None:
    """A member says which checkpoints it could load."""
    fact = event.fact
    assert isinstance(fact, Checkpoints)
    member = _speaker(turn, event)
    if member is None or _current(turn, fact.generation) is None:
        return
    turn.put(member, checkpoints=fact.steps)
    for skipped in fact.skipped:
        turn.because(f"rank {member.rank} skips {skipped}")


def on_first_step(turn: Turn, event: Event) -> None:
    """A member completed its first step in the new generation."""
    fact = event.fact
    assert isinstance(fact, FirstStep)
    member = _speaker(turn, event)
    turn.let(version=max(turn.state.version, fact.version))
    change = _current(turn, fact.generation)
    if member is not None and change is not None and change.going:
        turn.change(first_steps=change.first_steps | {member.name})


def on_finished(turn: Turn, event: Event) -> None:
    """A member has left its last step."""
    fact = event.fact
    assert isinstance(fact, Finished)
    member = _speaker(turn, event)
    if member is not None:
        turn.let(version=max(turn.state.version, fact.version))
        turn.put(member, status=Status.FINISHED, version=fact.version, weights_sha256=fact.weights_sha256)
