"""The values the job machine works on: what it was asked, what it knows, what it decided."""

from __future__ import annotations

import msgspec

from keepstep.control.exits import PastFailure
from keepstep.control.roster import Member, NodeSpec
from keepstep.records.events import Finding, Incident
from keepstep.records.messages import Fact, Order

__all__ = [
    "Change",
    "Decision",
    "Directed",
    "Event",
    "JobSpec",
    "JobState",
    "Loss",
    "Milestone",
    "StopRequest",
    "Tick",
]


class JobSpec(msgspec.Struct, frozen=True):
    """What was asked for. `world` ranks on `nnodes` agents; `patience_s` bounds one answer in a change."""

    job: str
    world: int
    nnodes: int
    keepstep_version: str
    secret: bytes
    max_restarts: int = 3
    patience_s: float = 120.0


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class StopRequest(msgspec.Struct, frozen=True):
    """A person or the scheduler ends the job with `code`."""

    code: int
    why: str


class Event(msgspec.Struct, frozen=True):
    """Something that reached the controller. `source_member` is empty when the agent itself speaks."""

    source_node: str
    source_member: str
    fact: Fact | Tick | StopRequest


class Directed(msgspec.Struct, frozen=True):
    """An order and where it goes: to `member`, or to the agent of `node` itself where `member` is empty."""

    node: str
    member: str
    order: Order
    reason: str


class Milestone(msgspec.Struct, frozen=True):
    """A phase of an incident was reached at wall time `at`."""

    incident: int
    name: str
    at: float


class Loss(msgspec.Struct, frozen=True):
    """A member that left its rank without leave. `onset` and `detected` are wall-clock times."""

    rank: int
    member: str
    node: str
    kind: str
    signal: int
    onset: float
    detected: float


class Change(msgspec.Struct, frozen=True):
    """A membership change on its way from the loss to the first valid step.

    `version` is the number of updates everybody has to stand at (-1: not known yet), `reached` the highest number any
    live member had, `restore` the checkpoint ordered (None: not needed so far, -1: the initial state). `private` holds
    what lost ranks last published, by rank and version. `initial` marks the agreement on a checkpoint at start-up.
    """

    generation: int
    began: float
    lost: tuple[Loss, ...]
    marks: dict[str, float] = {}
    version: int = -1
    reached: int = -1
    redone: bool = False
    restore: int | None = None
    finding: bool = False
    private: dict[int, dict[int, bytes]] = {}
    fetching: frozenset[str] = frozenset()
    going: bool = False
    first_steps: frozenset[str] = frozenset()
    initial: bool = False
    bytes_moved: int = 0


class JobState(msgspec.Struct, frozen=True):
    """All the controller knows of one job; `phase` as in `docs/architecture.md`."""

    spec: JobSpec
    epoch: int
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
    done_ranks: frozenset[int] = frozenset()
    exit_code: int | None = None
    exit_why: str = ""
    ending_since: float = 0.0


class Decision(msgspec.Struct, frozen=True):
    """What follows from one event. `incidents` are complete and go into the journal, as do `findings`."""

    state: JobState
    orders: tuple[Directed, ...] = ()
    reason: str = ""
    milestones: tuple[Milestone, ...] = ()
    findings: tuple[Finding, ...] = ()
    incidents: tuple[Incident, ...] = ()
