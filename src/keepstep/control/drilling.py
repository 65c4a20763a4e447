"""What a person's drill means for a job: which order goes to whom, or why it makes no sense. Pure."""

from __future__ import annotations

import math

import msgspec

from keepstep.control.job_state import Directed, JobState
from keepstep.control.node_drills import plan_node_drill
from keepstep.control.roster import Member, by_rank
from keepstep.errors import UsageError
from keepstep.records.drills import BAD_RELEASES, DRILLS, MISMATCHES, DrillKind, DrillRequest
from keepstep.records.messages import Drill

__all__ = ["drill_words", "parse_start_drill", "plan_drill"]

_OPTIONS = {
    "rank": "--rank",
    "source": "--from",
    "destination": "--to",
    "node": "--node",
    "factor": "--factor",
    "rate": "--rate",
    "how": "--how",
    "domain": "--domain",
}
_PLAIN = DrillRequest("")
_MOST_FACTOR = 100.0
_DEFAULT_FACTOR = 1.3
_WHY = "a person asked for it"


def plan_drill(state: JobState, request: DrillRequest) -> tuple[Directed, ...]:
    """The orders that carry `request` out, one for each rank that has to do something.

    Raises UsageError with one clear line for a drill that makes no sense in this job.
    """
    kind = _checked(state, request)
    if state.exit_code is not None:
        raise UsageError("the job is ending", remedy="drills need a running job")
    if kind.by == "node":
        return plan_node_drill(state, request)
    members = by_rank(state.members)
    return tuple(
        _directed(state, request, _holder(members, rank), kind=kind, peers=peers)
        for rank, peers in _hit(state, request).items()
    )


def parse_start_drill(text: str, *, world: int) -> tuple[str, int]:
    """The name and the rank in `NAME:RANK`. Raises UsageError for anything else."""
    name, _, number = text.partition(":")
    if name not in DRILLS or DRILLS[name].by != "start":
        known = ", ".join(name for name, kind in DRILLS.items() if kind.by == "start")
        raise UsageError(f"no drill to start with: {name or repr(text)}", remedy=f"one of {known}, as NAME:RANK")
    if not number.isascii() or not number.isdigit():
        raise UsageError(f"--drill {text} names no rank", remedy=f"write --drill {name}:RANK")
    _check_rank(int(number[:9]), world)
    return name, int(number)


def drill_words(order: Drill) -> str:
    """What `order` does, for people."""
    what = f"{order.fault} of rank {order.rank}"
    if DRILLS[order.fault].by == "node":
        what = f"{order.fault} of the node of rank {order.rank}" if order.rank >= 0 else f"{order.fault} of a node"
    if order.peers:
        what = f"{order.fault} from rank {order.rank} to {', '.join(map(str, order.peers))}"
    if order.stop:
        return f"the end of {what}"
    when = "now" if order.step < 0 else f"when it reaches step {order.step}"
    return f"{what} {when}" + (f", for {order.steps} steps" if order.steps else "")


def _checked(state: JobState, request: DrillRequest) -> DrillKind:
    """The kind of drill that `request` is, after everything in it was found to make sense."""
    kind = DRILLS.get(request.fault)
    if kind is None:
        raise UsageError(f"no such drill: {request.fault}", remedy=f"one of {', '.join(DRILLS)}")
    if kind.by == "start":
        remedy = f"give it with the start: keepstep run --drill {request.fault}:RANK"
        raise UsageError(f"{request.fault} happens before a rank takes part", remedy=remedy)
    _check_options(request, kind)
    _check_values(state, request)
    _check_time(request, kind)
    return kind


def _check_options(request: DrillRequest, kind: DrillKind) -> None:
    given = {name for name in _OPTIONS if getattr(request, name) != getattr(_PLAIN, name)}
    for name in kind.needs:
        if name not in given:
            raise UsageError(f"{request.fault} needs {_OPTIONS[name]}", remedy="see keepstep drill --help")
    allowed = {*kind.needs, *(() if request.stop else kind.may)}
    for name in sorted(given - allowed):
        when = " --stop" if request.stop else ""
        raise UsageError(f"{_OPTIONS[name]} means nothing for {request.fault}{when}", remedy="leave it out")
    if "rate" in kind.may and not request.stop and len({"rate", "factor"} & given) != 1:
        raise UsageError(f"{request.fault} needs --rate or --factor", remedy="give one of them")


def _check_values(state: JobState, request: DrillRequest) -> None:
    for rank in (request.rank, request.source, request.destination):
        if rank is not None:
            _check_rank(rank, state.spec.world)
    if request.source is not None and request.source == request.destination:
        raise UsageError("a link leads to another rank", remedy="give --from and --to two different ranks")
    if request.factor and not 1.0 < request.factor <= _MOST_FACTOR:
        raise UsageError(
            f"factor {request.factor:g}", remedy=f"how many times as long: above 1, at most {_MOST_FACTOR:g}"
        )
    if request.rate and not (request.rate > 0 and math.isfinite(request.rate)):
        raise UsageError(f"rate {request.rate:g}", remedy="bytes per second, above 0; cut-link lets nothing pass")
    hows = BAD_RELEASES if request.fault == "bad-release" else MISMATCHES
    if request.how and request.how not in hows:
        raise UsageError(f"no {request.fault} {request.how!r}", remedy=f"one of {', '.join(hows)}")
    if request.node and request.node not in {node.name for node in state.nodes}:
        known = ", ".join(node.name for node in state.nodes) or "none yet"
        raise UsageError(f"no node {request.node!r} in this job", remedy=f"nodes: {known}")
    if request.node and len(state.nodes) < 2:
        raise UsageError("all ranks are on one node, which has no links to others", remedy="use throttle-link")


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UsageError(f"no rank {rank} in a job of {world}", remedy=f"ranks are 0 to {world - 1}")


def _check_time(request: DrillRequest, kind: DrillKind) -> None:
    if request.step < -1:
        raise UsageError(f"no step {request.step}", remedy="steps count from 0")
    if request.steps < 0:
        raise UsageError(f"for {request.steps} steps", remedy="give at least 1, or leave it out: until --stop")
    if not kind.lasts and (request.steps or request.stop):
        raise UsageError(f"{request.fault} is over at once: nothing goes on or can be stopped", remedy="leave it out")
    if request.fault == "freeze" and request.steps:
        raise UsageError("a frozen rank makes no steps to count", remedy="end it with --stop")
    if request.stop and (request.steps or request.step != -1):
        raise UsageError("--stop ends a drill at once", remedy="leave --steps and --at-step out")


def _hit(state: JobState, request: DrillRequest) -> dict[int, tuple[int, ...]]:
    """Who has to act, with the ranks at the other ends of the links it has to slow down."""
    if request.source is not None and request.destination is not None:
        return {request.source: (request.destination,)}
    if request.rank is not None:
        return {request.rank: ()}
    home = {rank: member.node for rank, member in by_rank(state.members).items()}
    inside = tuple(rank for rank, node in home.items() if node == request.node)
    outside = tuple(rank for rank, node in home.items() if node != request.node)
    if not inside or not outside:
        where = "all ranks are" if inside else "no rank is"
        raise UsageError(f"{where} on node {request.node}: no link leads to another node", remedy="name another node")
    return {**dict.fromkeys(inside, outside), **dict.fromkeys(outside, inside)}


def _holder(members: dict[int, Member], rank: int) -> Member:
    if rank not in members:
        raise UsageError(f"nobody holds rank {rank} at the moment", remedy="try again in a moment")
    return members[rank]


def _directed(
    state: JobState, request: DrillRequest, holder: Member, *, kind: DrillKind, peers: tuple[int, ...]
) -> Directed:
    factor = request.factor or (_DEFAULT_FACTOR if "factor" in kind.may and "rate" not in kind.may else 0.0)
    order = Drill(state.epoch, request.fault, holder.rank, request.step, steps=request.steps, peers=peers)
    order = msgspec.structs.replace(
        order,
        factor=0.0 if request.stop else factor,
        rate=request.rate,
        how=request.how or ("op" if "how" in kind.may else ""),
        stop=request.stop,
    )
    return Directed(holder.node, holder.name if kind.by == "member" else "", order, _WHY)
