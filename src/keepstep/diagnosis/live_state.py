"""What the live analysis is told, what it says, and what it remembers between two calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from keepstep.diagnosis.baseline import Baseline
from keepstep.diagnosis.pair_history import PairHistory
from keepstep.diagnosis.windows import History, Numbers
from keepstep.records.finding import Finding
from keepstep.records.summary import MemberProfile, MemberProgress, StalledPeer

__all__ = ["Burst", "LiveFinding", "Seen", "Verdict", "Watch", "WatchPlan"]


class LiveFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One change of what is known: a finding begins, says more than before, or ends. `key` stays the same meanwhile.

    `hard`: no progress, one origin and evidence that it will not move again; only such a finding may be acted on.
    """

    key: str
    status: Literal["new", "updated", "ended"]
    finding: Finding
    began_step: int | None = None
    hard: bool = False


class WatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to watch: `world` ranks of `job`. `baseline` is an earlier run's normal; `open` are the findings that the
    journal says have not ended, where the analysis goes on after a restart. A rank that does nothing for eight times
    `hang_s` seconds, while others wait, will not go on."""

    world: int
    job: str = ""
    baseline: Baseline | None = None
    open: tuple[LiveFinding, ...] = ()
    hang_s: float = 5.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one test says now. `since` is the first step that shows it (None: not a matter of steps)."""

    key: str
    finding: Finding
    since: int | None = None
    hard: bool = False


class Burst(msgspec.Struct, frozen=True):
    """A rank was slower than its peers, by a log ratio of `ratio`, for `length` steps up to `last`, then no more."""

    rank: int
    last: int
    length: int
    ratio: float = 0.0


@dataclass
class Seen:
    """The newest word on one rank. Times are wall-clock seconds of whoever calls the analysis.

    `quiet_cpu` and `quiet_stack` are when the CPU total was last seen to grow and the stacks last seen to change,
    `moved` when anything of it last began or ended.
    """

    heard: float
    node: str = ""
    progress: MemberProgress | None = None
    told: float = 0.0
    cpu_us: int = 0
    cpu_at: float = 0.0
    busy_at: float = 0.0
    stack: int = 0
    stack_at: float = 0.0
    moved: float = 0.0
    waits: dict[int, StalledPeer] = field(default_factory=dict)


@dataclass
class Watch:
    """The state of the analysis. `observe` uses up the one it is given and returns the one to go on with.

    `anchors` are the usual log ratio, its scatter and the excess (us) of ranks with an open finding, `data_anchors`
    their usual wait for data: a fault that lasts does not become usual. `advanced` is when the job last completed a
    step or began, `stepped` when a step was last seen to end, `alarmed` the last step with a verdict that blames,
    `crowded` the step from which on several links of a node are slow.
    """

    plan: WatchPlan
    history: History
    pairs: PairHistory
    seen: dict[int, Seen] = field(default_factory=dict)
    profiles: dict[int, MemberProfile] = field(default_factory=dict)
    nodes: dict[str, float] = field(default_factory=dict)
    groups: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    generation: int = -1
    renewed: bool = False
    advanced: float = 0.0
    stepped: float = 0.0
    stood: tuple[float, float, tuple[Verdict, ...]] = (0.0, -1.0, ())
    findings: dict[str, LiveFinding] = field(default_factory=dict)
    pending: dict[str, float] = field(default_factory=dict)
    clear: dict[str, int] = field(default_factory=dict)
    bursts: list[Burst] = field(default_factory=list)
    anchors: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    data_anchors: dict[int, float] = field(default_factory=dict)
    pair_usual: tuple[Numbers, Numbers, Numbers, Numbers] | None = None
    pair_measured: int = -1
    alarmed: int = -1
    past: dict[str, tuple[int, Numbers, Numbers, int]] = field(default_factory=dict)
    roles: tuple[int, int, Numbers] | None = None
    held: dict[int, int] = field(default_factory=dict)
    crowded: dict[str, int] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)
