"""Drills that hit whole nodes: which agents are told what, or why it makes no sense. Pure."""

from __future__ import annotations

import msgspec

from keepstep.control.job_state import Directed, JobState
from keepstep.control.roster import live
from keepstep.errors import UsageError
from keepstep.records.drills import DrillRequest
from keepstep.records.messages import Drill

__all__ = ["plan_node_drill"]

_WHY = "a person asked for it"
_DEFAULT_FACTOR = 2.0
_LOSSES = ("lose-node", "lose-domain")


def plan_node_drill(state: JobState, request: DrillRequest) -> tuple[Directed, ...]:
    """The orders that carry `request` out: one for each node, or one for each rank that is made slow.

    Raises UsageError where no node, or every node, would be hit.
    """
    here = tuple(node.name for node in state.nodes if not node.gone)
    hit = (request.node,) if request.node else state.domains.nodes_in(request.domain, here)
    if not hit:
        known = sorted({name for node in here for name in state.domains.of(node)})
        raise UsageError(f"no node of this job is in {request.domain!r}", remedy=f"domains: {', '.join(known)}")
    if request.fault in _LOSSES and set(here) <= set(hit):
        raise UsageError("these are all nodes of the job: nobody would be left to see it", remedy="name fewer")
    if request.fault == "bad-release" and request.how == "slow":
        return _slow(state, request, hit)
    return tuple(_to_agent(state, request, node) for node in hit)


def _to_agent(state: JobState, request: DrillRequest, node: str) -> Directed:
    rank = min((m.rank for m in live(state.members) if m.node == node), default=-1)
    return Directed(node, "", Drill(state.epoch, request.fault, rank, request.step, stop=request.stop), _WHY)


def _slow(state: JobState, request: DrillRequest, hit: tuple[str, ...]) -> tuple[Directed, ...]:
    order = Drill(
        state.epoch,
        "slow-compute",
        -1,
        request.step,
        steps=request.steps,
        factor=0.0 if request.stop else request.factor or _DEFAULT_FACTOR,
        stop=request.stop,
    )
    return tuple(
        Directed(m.node, m.name, msgspec.structs.replace(order, rank=m.rank), _WHY)
        for m in live(state.members)
        if m.node in hit
    )
