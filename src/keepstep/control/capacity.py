"""Where processes can go: which standby takes a rank, where a fresh process starts, and what if there is no room."""

from __future__ import annotations

from collections import Counter

from keepstep.control.domains import joint, standby_order
from keepstep.control.job_state import Loss
from keepstep.control.outcome import end_job
from keepstep.control.roster import Member, Status, free_places, live, standbys
from keepstep.control.turn import Turn
from keepstep.control.warming import warmth

__all__ = ["choose_standby", "node_for_rank", "run_short", "stop_when_short"]

_NO_MACHINE = 75
_TROUBLE = 2
"""So many of the newest losses on one node make it a node that has failed."""


def choose_standby(turn: Turn, rank: int) -> Member | None:
    """The warm standby that should take `rank`, by the labels of the nodes; None if none is warm.

    It says where the choice leaves something to be wished for.
    """
    warm = sorted(standbys(turn.state.members, Status.WARM), key=lambda m: warmth(turn.state, m, rank=rank))
    if not warm:
        return None
    copies, failed = _copies(turn, rank), _failed(turn)
    order = standby_order(
        [m.node for m in warm], turn.state.domains, home=_home(turn, rank), copies=copies, failed=failed
    )
    chosen = warm[order[0]]
    _warn(turn, rank, node=chosen.node, copies=copies, failed=failed)
    return chosen


def _loss(turn: Turn, rank: int) -> Loss | None:
    lost = turn.state.change.lost if turn.state.change is not None else ()
    return next((loss for loss in reversed(lost) if loss.rank == rank), None)


def _home(turn: Turn, rank: int) -> str:
    loss = _loss(turn, rank)
    return loss.node if loss is not None else ""


def _copies(turn: Turn, rank: int) -> list[str]:
    """The nodes of live members that hold what `rank` held, as far as that is known."""
    loss = _loss(turn, rank)
    lost = turn.state.members.get(loss.member) if loss is not None else None
    if lost is None or not lost.replica:
        return []
    return [m.node for m in live(turn.state.members) if m.replica == lost.replica and m.rank != rank]


def _failed(turn: Turn) -> list[str]:
    """Nodes that were lost as a whole in this change, or where members were lost again and again."""
    lost = turn.state.change.lost if turn.state.change is not None else ()
    whole = [loss.node for loss in lost if loss.together]
    again = [node for node, count in Counter(turn.state.troubled).items() if node and count >= _TROUBLE]
    return sorted({*whole, *again})


def _warn(turn: Turn, rank: int, *, node: str, copies: list[str], failed: list[str]) -> None:
    state = turn.state
    inevitable = joint(state.domains, (n.name for n in state.nodes if not n.gone))
    mine = state.domains.of(node) - inevitable
    with_failed = sorted(mine & {name for other in failed for name in state.domains.of(other)})
    with_all = sorted(mine & joint(state.domains, copies))
    if with_failed:
        turn.because(f"placement: rank {rank} goes to {node}, which shares {', '.join(with_failed)} with what failed")
    if with_all:
        turn.because(
            f"placement: rank {rank} goes to {node}, and {', '.join(with_all)} then holds it and all its copies"
        )


def node_for_rank(turn: Turn, rank: int) -> str:
    """Where a fresh process for `rank` is started: at home if that is there, else where there is room; "" nowhere."""
    room = free_places(turn.state.nodes, turn.state.members)
    home = _home(turn, rank)
    nodes = [node for node, free in room.items() if free]
    order = standby_order(nodes, turn.state.domains, home=home, copies=_copies(turn, rank), failed=_failed(turn))
    if home in room and (room[home] or len(room) == 1):
        return home
    return nodes[order[0]] if nodes else ""


# ---------------------------------------------------------------- fewer machines than members


def run_short(turn: Turn, ranks: tuple[int, ...]) -> None:
    """No machine has room for `ranks`: say so once, and wait for another agent or end the job."""
    if turn.state.short:
        return
    what = f"fewer machines than members: ranks {list(ranks)} have no place and no standby will come"
    patience_s = turn.state.spec.shortage_s
    if patience_s <= 0:
        end_job(turn, _NO_MACHINE, why=f"{what} (on_shortage is stop)")
        return
    turn.let(short=turn.now)
    turn.because(f"{what}: waiting up to {patience_s:g} s for another agent to join")


def stop_when_short(turn: Turn) -> None:
    """End the job if the machines that are missing did not come in time; processes on their way are waited for."""
    state = turn.state
    if standbys(state.members, Status.STARTING):
        return
    if state.short and state.exit_code is None and turn.now - state.short > state.spec.shortage_s:
        end_job(
            turn, _NO_MACHINE, why=f"fewer machines than members, and none joined within {state.spec.shortage_s:g} s"
        )
