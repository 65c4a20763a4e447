"""Who is in the job: members, their status and the questions asked about them."""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec

from keepstep.records.messages import Address

__all__ = [
    "Member",
    "NodeSpec",
    "Status",
    "by_rank",
    "free_local_rank",
    "free_places",
    "live",
    "node_of_rank",
    "standbys",
    "with_member",
]


class Status(Enum):
    """Where a process stands. Members run from STARTING over CONNECTED to RUNNING; joiners from WARM over JOINING.

    One that has handed its rank over in a move is LEAVING until its exit.
    """

    STARTING = "starting"
    CONNECTED = "connected"
    RUNNING = "running"
    PARKED = "parked"
    SETTLED = "settled"
    WARM = "warm"
    JOINING = "joining"
    READY = "ready"
    FETCHED = "fetched"
    FINISHED = "finished"
    LEAVING = "leaving"
    FENCED = "fenced"
    GONE = "gone"


_DEAD = frozenset({Status.LEAVING, Status.FENCED, Status.GONE})


class NodeSpec(msgspec.Struct, frozen=True):
    """What one agent offers: ranks, standbys, its address and free ports (one for each attempt); `gone`: it is lost."""

    name: str
    slots: int
    standbys: int
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    gone: bool = False


class Member(msgspec.Struct, frozen=True):
    """One process of the job. `rank` is -1 while it has no role; `joiner` while its state is not the job's.

    `version` and `agreed` are its last `Parked` or `Settled` answer, given for `answered` (a generation). `ready` says
    that a joiner has run its set-up, `unprepared` that its pipeline schedules are not prepared by it. `local` are those
    of its `checkpoints` on its disk, `written_in` says in which job and generation each was written. `started` is the
    wall-clock time of the order to start it. `error` is what its script raised of its own accord at wall-clock time
    `failed`; its process is about to exit. `moving` is the number of the move it is a joiner of (0: none), `heir_of`
    the rank it is to take there; `released` is when it was let go.
    `warming` says that it rehearses, `warmed` which kinds of role it has rehearsed (None: it was not asked to).
    """

    name: str
    rank: int
    node: str
    status: Status
    local_rank: int = -1
    started: float = 0.0
    address: Address | None = None
    joiner: bool = False
    ready: bool = False
    unprepared: bool = False
    answered: int = -1
    version: int = -1
    agreed: bool = False
    digest: str = ""
    replica: str = ""
    checkpoints: tuple[int, ...] | None = None
    local: tuple[int, ...] = ()
    written_in: tuple[str, ...] = ()
    weights_sha256: str = ""
    error: str = ""
    failed: float = 0.0
    torch_version: str = ""
    moving: int = 0
    heir_of: int = -1
    released: float = 0.0
    warming: bool = False
    warmed: tuple[str, ...] | None = None


def live(members: dict[str, Member]) -> list[Member]:
    """Members that hold a rank and are neither gone nor fenced, by rank."""
    return sorted((m for m in members.values() if m.rank >= 0 and m.status not in _DEAD), key=lambda m: m.rank)


def by_rank(members: dict[str, Member]) -> dict[int, Member]:
    """The live member of every rank that has one."""
    return {member.rank: member for member in live(members)}


def standbys(members: dict[str, Member], status: Status | None = None) -> list[Member]:
    """Processes without a role that are alive (and have `status`, if given), oldest first."""
    free = [m for m in members.values() if m.rank < 0 and m.heir_of < 0 and m.status not in _DEAD]
    return [m for m in free if status is None or m.status is status]


def free_local_rank(members: dict[str, Member], node: str) -> int:
    """The smallest local rank that no live member on `node` has, or is about to have."""
    joining = [m for m in members.values() if m.heir_of >= 0 and m.status not in _DEAD]
    taken = {m.local_rank for m in (*live(members), *joining) if m.node == node}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def free_places(nodes: tuple[NodeSpec, ...], members: dict[str, Member]) -> dict[str, int]:
    """For each node that is there: how many more processes it was given room for, as ranks and standbys."""
    alive = Counter(m.node for m in members.values() if m.status not in _DEAD)
    return {n.name: max(0, n.slots + n.standbys - alive[n.name]) for n in nodes if not n.gone}


def with_member(members: dict[str, Member], member: Member) -> dict[str, Member]:
    """A copy of `members` with `member` in it."""
    return {**members, member.name: member}


def node_of_rank(nodes: tuple[NodeSpec, ...], rank: int) -> tuple[int, int]:
    """(index of the node, local rank) of `rank` when ranks are dealt to nodes in order.

    Raises IndexError for a rank beyond the slots of all nodes.
    """
    for index, node in enumerate(nodes):
        if rank < node.slots:
            return index, rank
        rank -= node.slots
    raise IndexError("rank beyond the slots of all nodes")
