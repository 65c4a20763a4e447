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
    on_script_failed,
    on_settled,
    on_state_kept,
)
from keepstep.control.capacity import run_short
from keepstep.control.change import reconcile
from keepstep.control.exclusion import deal_ranks
from keepstep.control.job_state import Decision, Event, JobSpec, JobState, StopRequest, TakeOver, Tick
from keepstep.control.losses import (
    on_exited,
    on_hung,
    on_mismatch,
    on_peer_lost,
    on_slow,
    on_start_failed,
    on_stopped,
    on_tick,
)
from keepstep.control.mirror_sources import on_mirrors
from keepstep.control.move_course import (
    advance_move,
    on_ask_address,
    on_move_committed,
    on_move_prepared,
    on_move_refused,
    on_move_request,
    on_move_taken,
)
from keepstep.control.new_leader import on_take_over
from keepstep.control.node_losses import late_node, on_domains, on_node_lost
from keepstep.control.outcome import end_job
from keepstep.control.roster import NodeSpec, Status
from keepstep.control.starting import assigned_slots, start_attempt
from keepstep.control.turn import Turn
from keepstep.control.warming import on_recording_kept, on_role_seen, on_warmed_up, order_warm_up
from keepstep.records.canary import CanaryLoss
from keepstep.records.domain_messages import NodeDomains, NodeLost, StateKept
from keepstep.records.messages import (
    AgentHello,
    Checkpoints,
    Fetched,
    FetchFailed,
    Finished,
    FirstStep,
    Hello,
    MemberExited,
    MemberStopped,
    Parked,
    PeerLostReport,
    Ready,
    ScriptFailed,
    Settled,
    StartFailed,
)
from keepstep.records.mirror_messages import Mirrors
from keepstep.records.move_messages import AskAddress, MoveCommitted, MovePrepared, MoveRefused, MoveTaken
from keepstep.records.moves import MoveRequest
from keepstep.records.sandbox_messages import RecordingKept, RoleSeen, WarmedUp
from keepstep.records.watch_messages import MemberHung, MemberSlow, MismatchSaid

__all__ = ["decide", "new_job"]


def new_job(spec: JobSpec, epoch: int) -> JobState:
    """The state of a job that waits for its agents; `epoch` is the leader's."""
    return JobState(spec=spec, epoch=epoch, domains=spec.domains)


def decide(state: JobState, event: Event, *, now: float) -> Decision:
    """What follows from `event` at wall-clock time `now` (seconds). A clock that goes back is taken to stand still."""
    now = max(now, state.clock)
    turn = Turn(state, now)
    turn.let(clock=now)
    if isinstance(event.fact, StateKept):
        on_state_kept(turn, event)
        return turn.decision()  # nothing follows from it
    handler = _HANDLERS.get(type(event.fact))
    if state.phase == "done" or handler is None:
        return turn.decision()
    if state.phase not in ("ending", "restarting") or _matters_at_the_end(state, event):
        handler(turn, event)
    reconcile(turn)
    advance_move(turn)
    order_warm_up(turn, state.members)
    _note_progress(turn, state)
    _advance(turn)
    return turn.decision()


def _matters_at_the_end(state: JobState, event: Event) -> bool:
    """While all members end, nothing they still say counts; standbys live on for the next attempt."""
    if isinstance(event.fact, AgentHello | NodeDomains):
        return state.phase == "restarting"
    if isinstance(event.fact, (Hello, MemberStopped)):
        name = event.fact.member
        return state.phase == "restarting" and name in state.members and state.members[name].rank < 0
    return isinstance(event.fact, (MemberExited, NodeLost, StartFailed, StopRequest, TakeOver, Tick))


def _note_progress(turn: Turn, before: JobState) -> None:
    """Patience is counted from the last thing that changed."""
    after = turn.state
    if after.change is None or before.change is None:
        return
    answers = [[(m.status, m.answered, m.checkpoints) for m in s.members.values()] for s in (before, after)]
    if answers[0] != answers[1]:
        turn.change(moved=turn.now)


def _advance(turn: Turn) -> None:
    """What no single event does: restart when all members are gone, be done when all processes are."""
    state = turn.state
    ranked = [m for m in state.members.values() if max(m.rank, m.heir_of) >= 0 and m.status is not Status.GONE]
    if state.phase == "restarting" and not ranked:
        kept = {name: m for name, m in state.members.items() if m.status is not Status.GONE}
        turn.let(phase="gathering", attempt=state.attempt + 1, members=kept, done_ranks=frozenset(), version=0)
        turn.let(disagreed=-1)
        _start_again(turn)
    elif state.phase == "ending" and all(m.status is Status.GONE for m in state.members.values()):
        turn.let(phase="done")
        turn.because(f"done, exit code {turn.state.exit_code}")


def _on_agent(turn: Turn, event: Event) -> None:
    fact = event.fact
    assert isinstance(fact, AgentHello)
    spec = turn.state.spec
    if turn.state.phase != "gathering" or turn.state.attempt:
        late_node(turn, fact)
        if turn.state.phase == "gathering":
            _start_again(turn)
        return
    if fact.keepstep_version != spec.keepstep_version:
        why = f"node {fact.node} runs keepstep {fact.keepstep_version}, the controller {spec.keepstep_version}"
        end_job(turn, 76, why=why)
        return
    known = [node for node in turn.state.nodes if node.name != fact.node]
    node = NodeSpec(fact.node, fact.slots, fact.standbys, fact.host, fact.ports)
    turn.let(nodes=(*known, node))
    if len(turn.state.nodes) < spec.nnodes:
        return
    turn.let(nodes=tuple(sorted(turn.state.nodes, key=lambda n: n.name)))
    if not assigned_slots(turn.state.nodes, spec.world):
        offered = sum(n.slots for n in turn.state.nodes)
        end_job(turn, 76, why=f"the agents offer {offered} ranks, the job has {spec.world}: start all agents alike")
        return
    turn.let(phase="starting")
    start_attempt(turn)


def _start_again(turn: Turn) -> None:
    """Start the next attempt, if the nodes that are left have room for all ranks."""
    world = turn.state.spec.world
    here = tuple(node for node in turn.state.nodes if not node.gone)
    nodes = deal_ranks(here, world=world)
    if nodes is None:
        run_short(turn, tuple(range(sum(node.slots + node.standbys for node in here), world)))
        return
    turn.let(phase="starting", nodes=nodes, short=0.0)
    start_attempt(turn)


def _on_stop(turn: Turn, event: Event) -> None:
    assert isinstance(event.fact, StopRequest)
    end_job(turn, event.fact.code, why=event.fact.why)


def _on_canary_loss(turn: Turn, event: Event) -> None:
    fact = event.fact
    assert isinstance(fact, CanaryLoss)
    end_job(turn, 1, why=f"the loss is {fact.loss} in {fact.log} on {event.source_node}")


# Facts that are not here tell the controller nothing: a process that started counts from its `Hello` on.
_HANDLERS: dict[type, Callable[[Turn, Event], None]] = {
    AgentHello: _on_agent,
    NodeDomains: on_domains,
    NodeLost: on_node_lost,
    StopRequest: _on_stop,
    TakeOver: on_take_over,
    Hello: on_hello,
    Parked: on_parked,
    Settled: on_settled,
    Ready: on_ready,
    Fetched: on_fetched,
    FetchFailed: on_fetch_failed,
    Checkpoints: on_checkpoints,
    Mirrors: on_mirrors,
    FirstStep: on_first_step,
    Finished: on_finished,
    ScriptFailed: on_script_failed,
    RoleSeen: on_role_seen,
    RecordingKept: on_recording_kept,
    WarmedUp: on_warmed_up,
    MemberExited: on_exited,
    MemberStopped: on_stopped,
    MemberHung: on_hung,
    MemberSlow: on_slow,
    MismatchSaid: on_mismatch,
    PeerLostReport: on_peer_lost,
    StartFailed: on_start_failed,
    CanaryLoss: _on_canary_loss,
    Tick: on_tick,
    MoveRequest: on_move_request,
    MovePrepared: on_move_prepared,
    MoveRefused: on_move_refused,
    MoveCommitted: on_move_committed,
    MoveTaken: on_move_taken,
    AskAddress: on_ask_address,
}
