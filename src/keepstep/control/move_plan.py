"""What a person's wish to move ranks means for a job: which process goes where, or why it makes no sense. Pure."""

from __future__ import annotations

from collections import Counter

from keepstep.control.job_state import JobState
from keepstep.control.move_state import Heir
from keepstep.control.roster import Member, Status, by_rank, free_places, live, standbys
from keepstep.control.warming import warmth
from keepstep.errors import UsageError
from keepstep.records.moves import MoveRequest

__all__ = ["plan_move", "plan_words"]

_AGAIN = "try again when it is over"
_NO_STANDBY = 3
"""Behind every `warmth`."""


def plan_move(state: JobState, request: MoveRequest) -> tuple[Heir, ...]:
    """Who gives up which rank, and where the joiner is to be. Raises UsageError, one clear line, training untouched."""
    _check_job(state)
    members = by_rank(state.members)
    ranks = _ranks(state, request)
    leavers = [_leaver(members, rank) for rank in ranks]
    if request.to:
        _check_node(state, request.to)
        for member in leavers:
            if member.node == request.to:
                raise UsageError(f"rank {member.rank} is on node {request.to} already", remedy="name another node")
    room, warm = _room(state), standbys(state.members, Status.WARM)
    heirs: list[Heir] = []
    for member in leavers:
        node = request.to or _elsewhere(state, member, room=room, warm=warm, without=request.node)
        room[node] -= 1
        if room[node] < 0:
            have = sum(heir.node == node for heir in heirs)
            what = f"standbys or room for {have} of these ranks only"
            raise UsageError(
                f"node {node} has {what if have else 'neither a standby nor room for another process'}",
                remedy="start the job with --standby, or name another node with --to",
            )
        heirs.append(Heir(member.rank, member.name, member.node, node))
    return tuple(heirs)


def plan_words(number: int, heirs: tuple[Heir, ...]) -> str:
    """What a move will do, for people."""
    moves = ", ".join(f"rank {h.rank} from {h.leaver} on {h.origin} to a standby on {h.node}" for h in heirs)
    return f"move {number}: {moves}"


def _check_job(state: JobState) -> None:
    if state.exit_code is not None or state.phase == "done":
        raise UsageError("the job is ending", remedy="a move needs a running job")
    if state.phase == "starting":
        waited = sorted(m.rank for m in live(state.members) if m.status is Status.STARTING)
        raise UsageError(
            f"ranks {waited} have not called keepstep.join()",
            remedy="a script without it cannot be moved; else try again when training has begun",
        )
    if state.move is not None:
        ranks = ", ".join(map(str, state.move.ranks))
        raise UsageError(f"move {state.move.number} (rank {ranks}) is under way", remedy=_AGAIN)
    if state.phase in ("changing", "restarting") or state.change is not None:
        raise UsageError("a membership change is under way", remedy=_AGAIN)
    if state.phase != "running" or not state.version:
        raise UsageError("no step is complete yet", remedy="try again when training has begun")
    if state.done_ranks or any(m.status is Status.FINISHED for m in live(state.members)):
        raise UsageError("the job has made its last step", remedy="a move needs steps to come")


def _ranks(state: JobState, request: MoveRequest) -> tuple[int, ...]:
    if bool(request.ranks) == bool(request.node):
        raise UsageError("neither ranks nor a node, or both, are given", remedy="give --rank (once a rank) or --node")
    for rank in request.ranks:
        if not 0 <= rank < state.spec.world:
            world = state.spec.world
            raise UsageError(f"no rank {rank} in a job of {world}", remedy=f"ranks are 0 to {world - 1}")
    if twice := sorted(rank for rank, times in Counter(request.ranks).items() if times > 1):
        raise UsageError(f"rank {twice[0]} is given twice", remedy="give each rank once: it moves once")
    if request.ranks:
        return tuple(sorted(request.ranks))
    _check_node(state, request.node)
    found = tuple(member.rank for member in live(state.members) if member.node == request.node)
    if not found:
        raise UsageError(f"no rank is on node {request.node}", remedy="there is nothing to move")
    return found


def _check_node(state: JobState, name: str) -> None:
    there = [node.name for node in state.nodes if not node.gone]
    if name not in there:
        raise UsageError(f"no node {name!r} in this job", remedy=f"nodes: {', '.join(there) or 'none yet'}")


def _leaver(members: dict[int, Member], rank: int) -> Member:
    if rank not in members:
        raise UsageError(f"nobody holds rank {rank} at the moment", remedy="try again in a moment")
    return members[rank]


def _room(state: JobState) -> Counter[str]:
    """How many processes each node can give: standbys that are there or on their way, and free places."""
    waiting = Counter(m.node for m in standbys(state.members) if m.status in (Status.WARM, Status.STARTING))
    return Counter(free_places(state.nodes, state.members)) + waiting


def _elsewhere(state: JobState, member: Member, *, room: Counter[str], warm: list[Member], without: str) -> str:
    """A node for the joiner: not the leaver's own, unless no other has room; one with a standby in `warm` comes first,
    and of these one where such a role was rehearsed.

    Never `without`, which all its ranks are to leave.
    """
    best: dict[str, int] = {}
    for one in warm:
        best[one.node] = min(best.get(one.node, _NO_STANDBY), warmth(state, one, rank=member.rank))
    there = [node.name for node in state.nodes if not node.gone and node.name != without]
    if not there:
        raise UsageError(f"there is no node but {without}", remedy="start an agent on another node, or name --rank")
    none = _NO_STANDBY
    return min(there, key=lambda name: (room[name] <= 0, name == member.node, best.get(name, none), -room[name]))
