"""Taking a suspected node out of a job whose members cannot be replaced one by one: its ranks go to the others."""

from __future__ import annotations

import msgspec

from keepstep.control.roster import NodeSpec, Status
from keepstep.control.turn import GRACE_S, Turn

__all__ = ["deal_ranks", "exclude_node", "without_node"]


def without_node(nodes: tuple[NodeSpec, ...], name: str, *, world: int) -> tuple[NodeSpec, ...] | None:
    """The nodes without `name`, and without those that are gone, with its ranks dealt to them; None: no room."""
    return deal_ranks(tuple(node for node in nodes if node.name != name and not node.gone), world=world)


def deal_ranks(rest: tuple[NodeSpec, ...], *, world: int) -> tuple[NodeSpec, ...] | None:
    """The nodes with `world` ranks on them, where standbys were to be first; None if there is no room.

    A node has room for as many ranks as it was given processes: ranks and standbys.
    """
    missing = world - sum(node.slots for node in rest)
    dealt = []
    for node in rest:
        taken = min(node.standbys, max(missing, 0))
        missing -= taken
        dealt.append(msgspec.structs.replace(node, slots=node.slots + taken, standbys=node.standbys - taken))
    return tuple(dealt) if rest and missing <= 0 else None


def exclude_node(turn: Turn, name: str) -> bool:
    """From the next attempt on nothing runs on node `name`; False, with the reason kept, where that cannot be."""
    state = turn.state
    nodes = without_node(state.nodes, name, world=state.spec.world)
    if nodes is None:
        if len(state.nodes) > 1:
            turn.because(f"node {name} stays: the others have no room for its ranks (standbys make room)")
        return False
    turn.let(nodes=nodes)
    turn.because(f"node {name} is excluded")
    for member in state.members.values():
        if member.node == name and member.rank < 0 and member.status is not Status.GONE:
            turn.kill(turn.put(member, status=Status.FENCED), f"node {name} is excluded", grace_s=GRACE_S)
    return True
