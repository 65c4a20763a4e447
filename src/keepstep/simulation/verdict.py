"""One run judged: did the job end as it must, after these faults?"""

from __future__ import annotations

import re

import msgspec

from keepstep.records.incident import PHASES, Incident
from keepstep.simulation.truth import Violation
from keepstep.simulation.world import World, draw_plan

__all__ = ["Verdict", "judge", "simulate", "transcript"]

_EXCUSES = (
    (r"no restart is left", "restarts"),
    (r"an error of the script", "script"),
    (r"again: an error of the script", "again"),
    (r"processes that should take rank", "standbys"),
    (r"had made their last step|ended with code 0 while others", "late"),
    (r"could not be started", "start"),
    (r"interrupted", "stop"),
)


class Verdict(msgspec.Struct, frozen=True):
    """How a run ended: the job's exit code, the reason, whole restarts, incidents, faults, simulated seconds, and
    how many planned moves were made and not made."""

    seed: int
    code: int
    why: str
    restarts: int
    incidents: int
    faults: int
    seconds: float
    moved: int = 0
    unmoved: int = 0


def simulate(seed: int) -> Verdict:
    """Run the world of `seed` and judge it. Raises Violation, with the seed in its text."""
    world = World(draw_plan(seed))
    try:
        ended = world.run()
        judge(world, ended=ended)
    except Violation as error:
        raise Violation(f"seed {seed}: {error} -> python -m keepstep.simulation {seed}") from error
    state = world.state
    return Verdict(
        seed=seed,
        code=-1 if state.exit_code is None else state.exit_code,
        why=state.exit_why,
        restarts=state.attempt,
        incidents=len(world.incidents),
        faults=len(world.injector.struck),
        seconds=world.engine.now,
        moved=sum(1 for record in world.moves if record.outcome == "made"),
        unmoved=sum(1 for record in world.moves if record.outcome != "made"),
    )


def judge(world: World, *, ended: bool) -> None:
    """Raises Violation if the job hangs, loses anything, or ends badly without a cause."""
    state = world.state
    if not ended:
        raise Violation(f"the job hangs in phase {state.phase}: {state.change}")
    if any(trainee.life.alive for trainee in world.trainees.values()):
        raise Violation("a process is left behind")
    for incident in world.incidents:
        _check_incident(incident)
    _check_alarms(world)
    _check_swapped(world)
    _check_moves(world)
    if state.exit_code == 0:
        _check_success(world)
    else:
        _check_failure(world)


def _check_incident(incident: Incident) -> None:
    """Phases come in order and none before the onset."""
    times = [(name, getattr(incident, name)) for name in PHASES if getattr(incident, name) is not None]
    for (earlier, first), (later, second) in zip(times, times[1:], strict=False):
        if first > second:
            raise Violation(f"incident {incident.number}: {earlier} at {first} comes after {later} at {second}")


def _check_alarms(world: World) -> None:
    """One incident for a member at most, and none without a fault."""
    members = [incident.member for incident in world.incidents if incident.member is not None]
    if len(members) != len(set(members)):
        raise Violation(f"more than one incident for a member: {members}")
    kinds = {kind for kind, _, _ in world.injector.struck}
    script = world.plan.script
    struck = {name for _, name, _ in world.injector.struck}
    left = {name for record in world.moves for name in record.leavers}
    if len(members) < len(world.incidents) and "cut" not in kinds and not left & struck:
        raise Violation("a false alarm: links are made anew, and none was cut")
    if script.crashes is None and script.raises is None and "damage" not in kinds and not set(members) <= struck:
        raise Violation(f"a false alarm: nothing was done to {set(members) - struck}")


def _check_success(world: World) -> None:
    """G-2, G-11: every rank made every step, and every loss was told."""
    steps, layout = world.plan.script.steps, world.plan.layout
    finished = {t.rank for t in world.trainees.values() if t.finished and t.machine.version == steps}
    if finished != set(range(layout.world)):
        raise Violation(f"only ranks {sorted(finished)} made all {steps} steps")
    told = {incident.member for incident in world.incidents} | _apart(world)
    for kind, name, rank in world.injector.struck:
        if kind in ("kill", "segfault", "pair") and rank >= 0 and name not in told and not world.state.attempt:
            raise Violation(f"{name} (rank {rank}) was killed and no incident tells it")
    if world.plan.script.raises is not None:
        raise Violation("the script raised an exception and the job ended well")


def _apart(world: World) -> set[str]:
    """Processes of moves whose end need not be an incident: joiners before they hold a rank, leavers after it."""
    return {name for record in world.moves for name in (*record.joiners, *record.leavers)}


def _check_moves(world: World) -> None:
    """An undisturbed move is made, unless somebody refused, and changes nobody else; what was asked for has an end."""
    if world.state.move is not None:
        raise Violation(f"a move has no end: {world.state.move}")
    plan = world.plan
    disturbed = (
        world.injector.struck or plan.script.raises or plan.script.crashes or plan.stop_s or plan.start_fails >= 0
    )
    for record in world.moves:
        late = "last step" in record.why or "the job ended" in record.why
        refused = record.refused or "cannot prepare" in record.why
        if record.outcome != "made" and not (disturbed or late or refused):
            raise Violation(f"move {record.number} is {record.outcome} for no reason: {record.why}")
    moved = {rank for record in world.moves for rank in record.ranks}
    others = {t.life.name for t in world.trainees.values() if t.finished and t.rank not in moved}
    if not disturbed and not others <= {f"m{rank}" for rank in range(plan.layout.world)}:
        raise Violation(f"a move changed processes that do not take part: {others}")


def _check_swapped(world: World) -> None:
    """One loss in mid-run with a live replica is repaired by a swap: no restart, no end."""
    injector, plan = world.injector, world.plan
    script_fails = plan.script.raises is not None or plan.script.crashes is not None
    if len(injector.struck) != 1 or injector.early or injector.late or script_fails or plan.stop_s:
        return
    kind, name, rank = injector.struck[0]
    replicas = sum(1 for other in range(plan.layout.world) if plan.layout.replica(other) == plan.layout.replica(rank))
    repairable = kind in ("kill", "segfault", "freeze") and rank >= 0 and replicas > 1 and plan.start_fails < 0
    if repairable and (world.state.attempt or world.state.exit_code):
        raise Violation(f"{kind} of {name} (rank {rank}) was not repaired by a swap: {world.state.exit_why}")


def _check_failure(world: World) -> None:
    """A job may end badly only for a cause that no swap can repair."""
    state, injector = world.state, world.injector
    excuses = {name for pattern, name in _EXCUSES if re.search(pattern, state.exit_why)}
    script = world.plan.script
    ranks = [rank for kind, _, rank in injector.struck if kind != "cut"]
    repeated = max((ranks.count(rank) for rank in ranks), default=0)
    allowed = {
        "restarts": state.attempt >= world.plan.max_restarts,
        "script": script.raises is not None or script.crashes is not None,
        "again": repeated >= 2 or len(injector.struck) >= 3,
        "standbys": len(injector.struck) >= 3,
        "late": injector.late,
        "start": world.plan.start_fails >= 0,
        "stop": world.plan.stop_s > 0,
    }
    if not any(allowed[excuse] for excuse in excuses):
        raise Violation(f"the job ended with code {state.exit_code} without a cause: {state.exit_why}")


def transcript(world: World) -> list[str]:
    """What happened, a line for each fact and each order."""
    lines = []
    for at, event, decision in world.journal:
        lines.append(f"{at:9.4f} {event.source_node}/{event.source_member} {event.fact}")
        if decision.reason:
            lines.append(f"            = {decision.reason}")
        lines += [f"            > {d.node}/{d.member or 'agent'} {type(d.order).__name__}" for d in decision.orders]
    return lines
