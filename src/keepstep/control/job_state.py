"""The values the job machine works on: what it was asked, what it knows, what it decided."""

from __future__ import annotations

import msgspec

from keepstep.control.domains import Domains
from keepstep.control.exits import PastFailure
from keepstep.control.move_state import Move
from keepstep.control.roster import Member, NodeSpec
from keepstep.records.events import Finding, FindingKind, Incident
from keepstep.records.messages import Fact, Order
from keepstep.records.mirror_messages import HeldMirror, Mirrors
from keepstep.records.moves import MoveRecord, MoveRequest
from keepstep.records.sandbox_messages import RoleKind

__all__ = [
    "Change",
    "Decision",
    "Directed",
    "Event",
    "JobSpec",
    "JobState",
    "Loss",
    "Milestone",
    "MirrorSearch",
    "Seat",
    "StopRequest",
    "TakeOver",
    "Tick",
    "WarmState",
    "incident_of",
]


class JobSpec(msgspec.Struct, frozen=True):
    """What was asked for. `world` ranks on `nnodes` agents; `patience_s` bounds one answer in a change.

    `domains` are the labels known beforehand. With fewer machines than members the job waits for `shortage_s` seconds
    (0: it stops at once). `sandbox` says that standbys rehearse.
    """

    job: str
    world: int
    nnodes: int
    keepstep_version: str
    secret: bytes
    max_restarts: int = 3
    patience_s: float = 120.0
    domains: Domains = Domains()
    shortage_s: float = 0.0
    sandbox: bool = False


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class TakeOver(msgspec.Struct, frozen=True):
    """Another controller goes on with the job, in leader `epoch`."""

    epoch: int


class StopRequest(msgspec.Struct, frozen=True):
    """A person or the scheduler ends the job with `code`."""

    code: int
    why: str


class Event(msgspec.Struct, frozen=True):
    """Something that reached the controller. `source_member` is empty when the agent itself speaks."""

    source_node: str
    source_member: str
    fact: Fact | Tick | StopRequest | TakeOver | MoveRequest


class Directed(msgspec.Struct, frozen=True):
    """An order and where it goes: to `member`, or to the agent of `node` itself where `member` is empty.

    `number` counts the orders to a node from 1 on, as soon as they are on their way (0: not counted).
    """

    node: str
    member: str
    order: Order
    reason: str
    number: int = 0


class Milestone(msgspec.Struct, frozen=True):
    """The incident of `rank` (-1: links only) reached a phase at wall time `at`. Said again, the later one counts."""

    incident: int
    name: str
    at: float
    rank: int


class Loss(msgspec.Struct, frozen=True):
    """A member that left its rank without leave; rank -1: nobody did, links broke. Times are wall clock.

    `joining` says that it had not made a step in its rank yet.
    `version` is the number of updates everybody then came to (-1: not known yet), `marks` when its repair reached
    which phase, `note` what a reader of the incident must know, `source` where its state came from. Losses with the
    same `together` (a domain) are one.
    """

    rank: int
    member: str
    node: str
    kind: FindingKind
    signal: int
    code: int
    onset: float
    detected: float
    joining: bool = False
    version: int = -1
    marks: dict[str, float] = {}
    note: str = ""
    together: str = ""
    source: str = ""


def incident_of(lost: tuple[Loss, ...], index: int) -> int:
    """Which incident of the change the loss at `index` belongs to, from 1: losses that happened as one share theirs."""
    return len({loss.together or f"#{number}" for number, loss in enumerate(lost[: index + 1])})


class MirrorSearch(msgspec.Struct, frozen=True):
    """Stayers were asked for mirrors. `answers` by member, `chosen` by joining rank with the holder; `over`: none fit.

    `refused` are (holder, rank, version) that could not be taken. `loadable` is the newest checkpoint that all can load
    (-1: none; None: nobody was asked, because none can be newer than the mirrors).
    """

    answers: dict[str, Mirrors] = {}
    chosen: dict[int, tuple[int, HeldMirror]] = {}
    refused: frozenset[tuple[int, int, int]] = frozenset()
    over: bool = False
    loadable: int | None = None


class Change(msgspec.Struct, frozen=True):
    """A membership change on its way from the loss to the first valid step.

    `version` is the number of updates everybody has to stand at (-1: not known yet), `reached` the highest number any
    live member had. `finding` says that checkpoints are looked for, `restore` is the one ordered (None: none so far,
    -1: the initial state), `blind` that there is none and joiners go on without the lost rank's own state. `private`
    holds what lost ranks last published, by rank and version. `fetching` are joiners that were sent to their sources,
    `failed` those of them that came back without. `initial` marks the agreement on a checkpoint at start-up. `moved`
    is the time of the last answer. `renew`: all links are made anew, because it began in the commit of a move. `anew`:
    all prepare their pipeline schedules anew, because a joiner could not, or had not yet in the change before. `search`
    is set once stayers were asked for mirrors.
    """

    generation: int
    moved: float
    lost: tuple[Loss, ...]
    version: int = -1
    reached: int = -1
    finding: bool = False
    restore: int | None = None
    blind: bool = False
    private: dict[int, dict[int, bytes]] = {}
    fetching: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    diverged: frozenset[str] = frozenset()
    going: bool = False
    first_steps: frozenset[str] = frozenset()
    initial: bool = False
    bytes_moved: int = 0
    renew: bool = False
    anew: bool = False
    search: MirrorSearch | None = None


class Seat(msgspec.Struct, frozen=True):
    """Where a rank was when it recorded: `local_rank` of `local_world` ranks of node number `node_rank`."""

    local_rank: int
    local_world: int
    node_rank: int


class WarmState(msgspec.Struct, frozen=True):
    """What is known for the rehearsals of standbys.

    `asked` are the members told to record, `seats` where their ranks were, `kinds` and `memory` what ranks said of
    themselves, `devices` the kinds that compute on something else than the CPU, `chosen` the kinds that are warmed,
    `keepers` the members that have still to write a recording, by kind, `kept` the kinds that lie in the run
    directory. `off`: there will be no rehearsal, or no other one, as one ended its process.
    """

    asked: frozenset[str] = frozenset()
    seats: dict[int, Seat] = {}
    kinds: dict[int, str] = {}
    memory: dict[int, int] = {}
    devices: frozenset[str] = frozenset()
    chosen: tuple[RoleKind, ...] = ()
    keepers: dict[str, str] = {}
    kept: frozenset[str] = frozenset()
    off: bool = False


class JobState(msgspec.Struct, frozen=True):
    """All the controller knows of one job; `phase` as in `docs/architecture.md`.

    `named` counts processes, `incidents` closed incidents. `suspected` are ranks to which links broke and when.
    `setup_s` is the longest time from the welcome to a first step, seconds. `leaving` is when the job began to end or
    to restart. `short` is since when there are fewer machines than members (0: there are enough), `troubled` the nodes
    of the newest losses. `moves` counts planned moves, `promised` is the highest generation that one was to install;
    `torch_version` is what the ranks run. `disagreed` is the rank that said in this attempt that collectives do not
    match (-1: none did).
    """

    spec: JobSpec
    epoch: int
    clock: float = 0.0
    phase: str = "gathering"
    nodes: tuple[NodeSpec, ...] = ()
    members: dict[str, Member] = {}
    attempt: int = 0
    generation: int = 0
    version: int = 0
    named: int = 0
    incidents: int = 0
    change: Change | None = None
    past: tuple[PastFailure, ...] = ()
    suspected: dict[int, float] = {}
    broken_standbys: int = 0
    welcomed: float = 0.0
    setup_s: float = 0.0
    done_ranks: frozenset[int] = frozenset()
    exit_code: int | None = None
    exit_why: str = ""
    leaving: float = 0.0
    domains: Domains = Domains()
    short: float = 0.0
    troubled: tuple[str, ...] = ()
    move: Move | None = None
    moves: int = 0
    promised: int = 0
    disagreed: int = -1
    torch_version: str = ""
    warm: WarmState = WarmState()

    @property
    def newest_generation(self) -> int:
        """The highest generation that is, was, or was to be."""
        changing = self.generation if self.change is None else self.change.generation
        return max(self.generation, changing, self.promised)


class Decision(msgspec.Struct, frozen=True):
    """What follows from one event. `incidents` and `moves` are complete and go into the journal, as do `findings`."""

    state: JobState
    orders: tuple[Directed, ...] = ()
    reason: str = ""
    milestones: tuple[Milestone, ...] = ()
    findings: tuple[Finding, ...] = ()
    incidents: tuple[Incident, ...] = ()
    moves: tuple[MoveRecord, ...] = ()
