"""The job machine: one event in, the new state, the orders and the reasons out. Pure.

Phases: gathering (agents) -> starting (members) -> running <-> changing (a membership change) -> ending -> done, with
restarting (all members end, a new attempt starts) as the way out where members cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.control.answers import (
    on_checkpoints,
    on_fetch_failed,
    on_fetched,
    on_finished,
    on_first_step,
    on_hello,
    on_parked,
    on_ready,
    on_settled,
)
from keepstep.control.change import reconcile
from keepstep.control.job_state import Decision, Event, JobSpec, JobState, StopRequest, Tick
from keepstep.control.losses import on_exited, on_peer_lost, on_start_failed, on_stopped, on_tick
from keepstep.control.roster import NodeSpec, Status
from keepstep.control.starting import assigned_slots, start_attempt
from keepstep.control.turn import Turn
from keepstep.records.messages import (
    AgentHello,
    Checkpoints,
    Fetched,
    FetchFailed,
    Finished,
    FirstStep,
    Hello,
    MemberExited,
    MemberStarted,
    MemberStopped,
    Parked,
    PeerLostReport,
    Ready,
    Settled,
    StartFailed,
)

__all__ = ["decide", "new_job"]


def new_job(spec: JobSpec, epoch: int) -> JobState:
    """The state of a job that waits for its agents; `epoch` is the leader's."""
    return JobState(spec=spec, epoch=epoch)


def decide(state: JobState, event: Event, now: float) -> Decision:
    """What follows from `event` at wall-clock time `now` (seconds)."""
    turn = Turn(state, now)
    if state.phase == "done":
        return turn.decision()
    handler = _HANDLERS[type(event.fact)]
    handler(turn, event)
    reconcile(turn)
    _advance(turn)
    return turn.decision()


def _advance(turn: Turn) -> None:
    """What no single event does: restart when all are gone, be done when all are gone."""
    ranked = [m for m in turn.state.members.values() if m.rank >= 0 and m.status is not Status.GONE]
    everybody = [m for m in turn.state.members.values() if m.status is not Status.GONE]
    if turn.state.phase == "restarting" and not ranked:
        turn.let(phase="starting", attempt=turn.state.attempt + 1, done_ranks=frozenset(), change=None, version=0)
        start_attempt(turn)
    elif turn.state.phase == "ending" and not everybody:
        turn.let(phase="done")
        turn.because(f"done, exit code {turn.state.exit_code}")


def _on_agent(turn: Turn, event: Event) -> None:
    fact = event.fact
    assert isinstance(fact, AgentHello)
    spec = turn.state.spec
    if turn.state.phase != "gathering":
        return
    if fact.keepstep_version != spec.keepstep_version:
        turn.end(76, f"node {fact.node} runs keepstep {fact.keepstep_version}, the controller {spec.keepstep_version}")
        return
    known = [node for node in turn.state.nodes if node.name != fact.node]
    node = NodeSpec(fact.node, fact.slots, fact.standbys, fact.host, fact.ports)
    turn.let(nodes=(*known, node))
    if len(turn.state.nodes) < spec.nnodes:
        return
    turn.let(nodes=tuple(sorted(turn.state.nodes, key=lambda n: n.name)))
    if not assigned_slots(turn.state.nodes, spec.world):
        offered = sum(n.slots for n in turn.state.nodes)
        turn.end(76, f"the agents offer {offered} ranks, the job has {spec.world}: start all agents alike")
        return
    turn.let(phase="starting")
    start_attempt(turn)


def _on_started(turn: Turn, event: Event) -> None:
    """A process runs; its `Hello` is what counts."""


def _on_stop(turn: Turn, event: Event) -> None:
    assert isinstance(event.fact, StopRequest)
    turn.end(event.fact.code, event.fact.why)


_HANDLERS: dict[type, Callable[[Turn, Event], None]] = {
    AgentHello: _on_agent,
    MemberStarted: _on_started,
    StopRequest: _on_stop,
    Hello: on_hello,
    Parked: on_parked,
    Settled: on_settled,
    Ready: on_ready,
    Fetched: on_fetched,
    FetchFailed: on_fetch_failed,
    Checkpoints: on_checkpoints,
    FirstStep: on_first_step,
    Finished: on_finished,
    MemberExited: on_exited,
    MemberStopped: on_stopped,
    PeerLostReport: on_peer_lost,
    StartFailed: on_start_failed,
    Tick: on_tick,
}
