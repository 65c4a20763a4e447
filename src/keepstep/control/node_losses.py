"""A whole node is lost, or joins late: all its members are one loss; what a new one offers becomes standbys."""

from __future__ import annotations

import msgspec

from keepstep.control.beginning import begin_change
from keepstep.control.domains import domain_name
from keepstep.control.job_state import Event, Loss
from keepstep.control.move_losses import claimant, lost_to_move
from keepstep.control.outcome import note_lost, restart_or_end
from keepstep.control.roster import Member, NodeSpec, Status
from keepstep.control.starting import start_standby
from keepstep.control.turn import Turn
from keepstep.records.domain_messages import NodeDomains, NodeLost
from keepstep.records.messages import AgentHello

__all__ = ["late_node", "on_domains", "on_node_lost"]

_SIGKILL = 9
_MOST_KINDS = 32
_MOST_CHARACTERS = 256


def on_domains(turn: Turn, event: Event) -> None:
    """An agent tells its labels: they win over what files say of its node."""
    fact = event.fact
    assert isinstance(fact, NodeDomains)
    labels = {kind: label[:_MOST_CHARACTERS] for kind, label in list(fact.labels.items())[:_MOST_KINDS]}
    turn.let(domains=turn.state.domains.with_labels(fact.node, labels))


def on_node_lost(turn: Turn, event: Event) -> None:
    """All members of a node are lost at once: one change, one incident."""
    fact = event.fact
    assert isinstance(fact, NodeLost)
    state = turn.state
    if state.phase == "gathering" and state.attempt == 0:
        turn.let(nodes=tuple(node for node in state.nodes if node.name != fact.node))
        return
    turn.let(nodes=tuple(msgspec.structs.replace(n, gone=n.gone or n.name == fact.node) for n in state.nodes))
    there = [m for m in state.members.values() if m.node == fact.node and m.status is not Status.GONE]
    for member in there:
        turn.put(member, status=Status.GONE)
    if state.phase in ("ending", "restarting") or turn.state.nodes == state.nodes:
        return
    lost = [m for m in there if m.status is not Status.FENCED]
    lost = [m for m in lost if not lost_to_move(turn, m, how=f"is lost with node {fact.node}", done=False)]
    ranked = sorted((claimant(m) for m in lost if claimant(m).rank >= 0), key=lambda m: m.rank)
    ranks = f"ranks {', '.join(str(m.rank) for m in ranked)}" if ranked else "no rank"
    idle = sum(m.rank < 0 for m in there)
    why = f"node {fact.node} is lost with {ranks} and {idle} standbys: {fact.why}"
    if not ranked:
        turn.because(why)
    elif _early(turn, ranked):
        note_lost(turn, _losses(turn, ranked))
        restart_or_end(turn, why, code=128 + _SIGKILL)
    else:
        begin_change(turn, _losses(turn, ranked), private={m.rank: {} for m in ranked}, why=why)
        for member in ranked:
            turn.mark("fenced", rank=member.rank, again=False)


def _early(turn: Turn, members: list[Member]) -> bool:
    """Whether some of them could not be replaced yet, or never: before the first step, or without keepstep's lines."""
    change = turn.state.change
    initial = change is not None and change.initial
    return initial or any(m.status in (Status.STARTING, Status.CONNECTED) for m in members if not m.joiner)


def _losses(turn: Turn, members: list[Member]) -> tuple[Loss, ...]:
    return tuple(
        Loss(
            rank=member.rank,
            member=member.name,
            node=member.node,
            kind="crash",
            signal=_SIGKILL,
            code=128 + _SIGKILL,
            onset=0.0,
            detected=turn.now,
            joining=member.joiner,
            together=domain_name("node", member.node),
        )
        for member in members
    )


def late_node(turn: Turn, fact: AgentHello) -> None:
    """An agent joins a job that runs: all its places are for standbys, and they are started."""
    places = fact.slots + fact.standbys
    node = NodeSpec(fact.node, 0, places, fact.host, fact.ports)
    turn.let(nodes=(*(known for known in turn.state.nodes if known.name != fact.node), node))
    turn.because(f"node {fact.node} joins with room for {places} standbys")
    if turn.state.phase in ("gathering", "restarting"):
        return
    for _ in range(places):
        start_standby(turn, fact.node, reason="start a standby")
