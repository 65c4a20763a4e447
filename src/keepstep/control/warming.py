"""How standbys come to rehearse: members record their first steps, one of each role kind keeps what it recorded."""

from __future__ import annotations

import msgspec

from keepstep.control.job_state import Event, JobState, Seat, WarmState
from keepstep.control.kinds import choose_kinds
from keepstep.control.roster import Member, Status, live, standbys
from keepstep.control.turn import Turn
from keepstep.records.sandbox_messages import (
    KeepRecording,
    RecordingKept,
    RecordStep,
    RoleKind,
    RoleSeen,
    WarmedUp,
    WarmUp,
)

__all__ = ["ask_to_record", "on_recording_kept", "on_role_seen", "on_warmed_up", "order_warm_up", "warmth"]


def ask_to_record(turn: Turn, members: list[Member]) -> None:
    """Before their welcome `members` are told to record their first steps; what earlier ones recorded is over."""
    if not turn.state.spec.sandbox or turn.state.warm.off or not any(node.standbys for node in turn.state.nodes):
        return
    turn.let(warm=WarmState(asked=frozenset(member.name for member in members), seats=_seats(members)))
    for member in members:
        turn.tell(member, RecordStep(turn.state.epoch), reason="standbys will rehearse with what its collectives give")


def on_role_seen(turn: Turn, event: Event) -> None:
    """A member has recorded its first steps and says what kind of role it has."""
    fact = event.fact
    assert isinstance(fact, RoleSeen)
    member = _speaker(turn, event)
    warm = turn.state.warm
    if member is not None and member.rank == fact.rank and not warm.chosen:
        memory = {**warm.memory, fact.rank: fact.memory_bytes}
        devices = warm.devices | ({fact.name} if fact.on_device else frozenset())
        _let(turn, kinds={**warm.kinds, fact.rank: fact.name}, memory=memory, devices=devices)


def on_recording_kept(turn: Turn, event: Event) -> None:
    """A recording lies in the run directory, or could not be written."""
    fact = event.fact
    assert isinstance(fact, RecordingKept)
    warm = turn.state.warm
    if _speaker(turn, event) is None or fact.name not in warm.keepers:
        return
    _let(turn, keepers={name: keeper for name, keeper in warm.keepers.items() if name != fact.name})
    if fact.why:
        turn.because(fact.why)
    else:
        _let(turn, kept=warm.kept | {fact.name})


def on_warmed_up(turn: Turn, event: Event) -> None:
    """A standby has rehearsed and waits again."""
    fact = event.fact
    assert isinstance(fact, WarmedUp)
    member = _speaker(turn, event)
    if member is None:
        return
    turn.put(member, warming=False, warmed=fact.names)
    turn.because(f"standby {member.name} rehearsed {len(fact.names)} kinds of role in {fact.seconds:.1f} s")
    if fact.why:
        turn.because(f"it is not as warm as it could be: {fact.why}")


def order_warm_up(turn: Turn, before: dict[str, Member]) -> None:
    """Have standbys that wait idle rehearse, if nothing else is going on; `before` are the members before this turn."""
    if not turn.state.spec.sandbox or turn.state.warm.off or _broken(turn, before):
        return
    warm = turn.state.warm
    if turn.state.phase != "running" or turn.state.change is not None:
        return
    if not warm.chosen:
        _choose_when_all(turn)
        return
    there = {member.name for member in live(turn.state.members)}
    kinds = tuple(kind for kind in warm.chosen if kind.name in warm.kept)
    if not kinds or there & set(warm.keepers.values()):
        return
    for standby in standbys(turn.state.members, Status.WARM):
        if not standby.warming and standby.warmed is None:
            warming = turn.put(standby, warming=True)
            order = WarmUp(turn.state.epoch, kinds, turn.state.spec.world)
            turn.tell(warming, order, reason=f"rehearse as ranks {[kind.rank for kind in kinds]}")


def _broken(turn: Turn, before: dict[str, Member]) -> bool:
    """True if a standby ended in its rehearsal: no other one is sent into one."""
    now = turn.state.members
    broken = [m for m in before.values() if m.warming and (m.name not in now or now[m.name].status is Status.GONE)]
    if broken and turn.state.phase in ("running", "changing"):
        _let(turn, off=True)
        turn.because(f"standby {broken[0].name} ended in its rehearsal: no other one rehearses")
    return bool(broken)


def _choose_when_all(turn: Turn) -> None:
    """When all have told: who stands for a kind keeps its recording, all others forget theirs."""
    warm = turn.state.warm
    asked = [member for member in live(turn.state.members) if member.name in warm.asked]
    if not warm.kinds or any(member.rank not in warm.kinds for member in asked):
        return
    kinds = {m.rank: warm.kinds[m.rank] for m in asked if warm.kinds[m.rank] not in warm.devices}
    chosen = tuple(_seated(kind, warm.seats) for kind in choose_kinds(kinds, warm.memory))
    keepers = {kind.rank: kind.name for kind in chosen}
    _let(turn, off=not chosen, chosen=chosen, keepers={keepers[m.rank]: m.name for m in asked if m.rank in keepers})
    if warm.devices:
        turn.because(f"roles of {len(warm.devices)} kinds compute on devices: they are not rehearsed")
    for member in asked:
        keep = member.rank in keepers
        why = "its recording stands for its kind of role" if keep else "another rank's recording stands for its kind"
        turn.tell(member, KeepRecording(turn.state.epoch, keep), reason=why)


def _seats(members: list[Member]) -> dict[int, Seat]:
    """As torchrun's variables say it to `members`, which are all ranks in order."""
    nodes = [member.node for member in members]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return {m.rank: Seat(m.local_rank, nodes.count(m.node), numbers[m.node]) for m in members}


def _seated(kind: RoleKind, seats: dict[int, Seat]) -> RoleKind:
    seat = seats.get(kind.rank, Seat(0, 1, 0))
    return msgspec.structs.replace(
        kind, local_rank=seat.local_rank, local_world=seat.local_world, node_rank=seat.node_rank
    )


def warmth(state: JobState, standby: Member, *, rank: int) -> int:
    """How well a standby fits `rank` (lower is better): it rehearsed such a role, did not, or is just rehearsing."""
    if standby.warming:
        return 2
    return 0 if state.warm.kinds.get(rank, "") in (standby.warmed or ()) else 1


def _speaker(turn: Turn, event: Event) -> Member | None:
    """The process that speaks, unless it is gone or fenced."""
    member = turn.state.members.get(event.source_member)
    return None if member is None or member.status in (Status.GONE, Status.FENCED) else member


def _let(turn: Turn, **changes: object) -> WarmState:
    changed = msgspec.structs.replace(turn.state.warm, **changes)
    turn.let(warm=changed)
    return changed
