"""Starting processes: which agent starts what, and the environment that torchrun's users expect."""

from __future__ import annotations

from keepstep.control.roster import Member, NodeSpec, Status, free_places, node_of_rank, standbys
from keepstep.control.turn import Turn
from keepstep.records.messages import StartMember

__all__ = ["assigned_slots", "rank_environment", "refill_standbys", "start_attempt", "start_standby"]


def assigned_slots(nodes: tuple[NodeSpec, ...], world: int) -> bool:
    """True if the nodes offer exactly `world` ranks."""
    return sum(node.slots for node in nodes) == world


def rank_environment(turn: Turn, rank: int, *, node: str) -> dict[str, str]:
    """The variables torchrun sets that depend on the job's shape, for `rank` (-1: a standby on `node`, without one)."""
    state = turn.state
    first = state.nodes[0]
    port = first.ports[state.attempt % len(first.ports)] if first.ports else 29500
    shared = {
        "WORLD_SIZE": str(state.spec.world),
        "GROUP_WORLD_SIZE": str(len(state.nodes)),
        "MASTER_ADDR": first.host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(state.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(state.spec.max_restarts),
    }
    if rank < 0:
        slots = {one.name: one.slots for one in state.nodes}
        return {**shared, "LOCAL_WORLD_SIZE": str(slots.get(node, 0) or first.slots)}
    index, local_rank = node_of_rank(state.nodes, rank)
    return {
        **shared,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(state.nodes[index].slots),
        "GROUP_RANK": str(index),
    }


def start_attempt(turn: Turn) -> None:
    """Start every rank, and the standbys that are not there yet, on their nodes."""
    for rank in range(turn.state.spec.world):
        index, local_rank = node_of_rank(turn.state.nodes, rank)
        _start(turn, turn.state.nodes[index].name, rank=rank, local_rank=local_rank, reason=f"start rank {rank}")
    for node in turn.state.nodes:
        alive = [m for m in standbys(turn.state.members) if m.node == node.name]
        for _ in range(node.standbys - len(alive)):
            start_standby(turn, node.name, reason="start a standby")


def refill_standbys(turn: Turn, *, reason: str) -> None:
    """Start standbys in place of those that took a rank: on their own nodes, or wherever there is room instead."""
    nodes = [node for node in turn.state.nodes if not node.gone]
    waiting = [m.node for m in standbys(turn.state.members)]
    missing = sum(node.standbys for node in nodes) - len(waiting)
    own = [(node.name, node.standbys - waiting.count(node.name)) for node in nodes]
    for name, wanted in [*own, *((node.name, missing) for node in nodes)]:
        for _ in range(wanted):
            if missing > 0 and free_places(turn.state.nodes, turn.state.members)[name]:
                start_standby(turn, name, reason=reason)
                missing -= 1


def start_standby(turn: Turn, node: str, *, reason: str) -> None:
    """Start a process without a role on `node` (empty: the first node)."""
    _start(turn, node or turn.state.nodes[0].name, rank=-1, local_rank=-1, reason=reason)


def _start(turn: Turn, node: str, *, rank: int, local_rank: int, reason: str) -> None:
    name = f"m{turn.state.named}"
    turn.let(named=turn.state.named + 1)
    turn.put(Member(name, rank, node, Status.STARTING, local_rank=local_rank, started=turn.now))
    order = StartMember(
        epoch=turn.state.epoch,
        member=name,
        rank=rank,
        local_rank=local_rank,
        attempt=turn.state.attempt,
        environment=rank_environment(turn, rank, node=node),
    )
    turn.tell_agent(node, order, reason=reason)
    turn.because(f"{reason} as {name} on {node}")
