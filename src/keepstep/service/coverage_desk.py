"""What the loss of each domain would cost: kept current in the journal of a running job, or planned from a file."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from keepstep.control.coverage import dealt_placement, live_placement, predict
from keepstep.control.domains import mirror_holders
from keepstep.control.job_state import JobState
from keepstep.errors import UsageError
from keepstep.fleet.coverage_text import coverage_text
from keepstep.records.coverage_records import CoverageRecord
from keepstep.records.domain_messages import CheckpointWritten, StateKept
from keepstep.records.messages import Fact, StateDigest
from keepstep.service.clock import Clock
from keepstep.service.controller import JobShell
from keepstep.service.domain_labels import domains_of_files
from keepstep.service.keeper import Keeper
from keepstep.service.run_directory import read_run
from keepstep.store.journal import read_journal

__all__ = ["CoverageDesk", "CoveragePlan", "plan_coverage", "shown", "told_coverage"]

_LOOK_S = 1.0
_CHECKPOINTS = 8
"""Newest checkpoints of which is known who has written his part."""
_Said = TypeVar("_Said", str, bool)


class CoverageDesk:
    """Keeps the table of one job current: `take` sees every fact, `run` writes a record when the table has changed."""

    def __init__(self, shell: JobShell, keeper: Keeper, *, clock: Clock) -> None:
        """Writes through `keeper`."""
        self._shell = shell
        self._keeper = keeper
        self._clock = clock
        self._told = 0  # grows with each word of a member that changes the table
        self._replicas: dict[int, str] = {}
        self._mirrored: dict[int, bool] = {}
        self._parts: dict[int, set[int]] = {}
        self._version = 0
        self._seen: tuple[JobState, int, int | None] | None = None
        self._written: CoverageRecord | None = None

    def take(self, fact: Fact) -> None:
        """Note what members say of their state in passing."""
        match fact:
            case StateDigest():
                self._note(self._replicas, fact.rank, said=fact.replica)
                self._version = max(self._version, fact.version)
            case StateKept():
                self._note(self._replicas, fact.rank, said=fact.replica)
                self._note(self._mirrored, fact.rank, said=fact.mirrored)
            case CheckpointWritten():
                self._parts.setdefault(fact.version, set()).add(fact.rank)
                self._version = max(self._version, fact.version)
                for version in sorted(self._parts)[:-_CHECKPOINTS]:
                    del self._parts[version]

    def _note(self, known: dict[int, _Said], rank: int, *, said: _Said) -> None:
        if known.get(rank) != said:
            known[rank] = said
            self._told += 1

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Write the table if the job stands still enough to have one, and it is not the last one."""
        state = self._shell.state
        if state.phase != "running" or state.change is not None:
            return
        version = max(state.version, self._version, *self._shell.steps().values())
        behind = self._behind(state, version)
        if self._seen is not None and self._seen[1:] == (self._told, behind) and _same_places(self._seen[0], state):
            return
        self._seen = state, self._told, behind
        placement = live_placement(state, replicas=self._replicas, behind=behind)
        holders = mirror_holders(placement.ranks_by_node(), state.domains)
        mirrors = {rank: holder for rank, holder in holders.items() if self._mirrored.get(rank)}
        own = bool(self._mirrored) and len(holders) == state.spec.world
        table = predict(msgspec.structs.replace(placement, mirrors=mirrors, own_holders=holders if own else {}))
        if table == self._written:
            return
        self._written = table
        identity = {"job": state.spec.job, "generation": state.generation, "step": version}
        self._keeper.keep(msgspec.structs.replace(table, wall=self._clock.wall(), **identity))

    def _behind(self, state: JobState, version: int) -> int | None:
        """How many steps the newest whole checkpoint is behind at most: as far as those so far are apart, or as it is
        now, if that is more. None where there is none."""
        whole = sorted(one for one, ranks in self._parts.items() if len(ranks) >= state.spec.world)
        if not whole:
            return None
        began = max(0, state.version - 1)  # the version of the job is that of the first step, or of the last change
        apart = [late - early for early, late in pairwise(whole)] or [whole[-1] - began]
        return max(version - whole[-1], *apart)


def _same_places(one: JobState, other: JobState) -> bool:
    """Whether nothing changed in `other` that a table is made from."""
    same = one.members is other.members and one.nodes is other.nodes and one.domains is other.domains
    return same and one.attempt == other.attempt


class CoveragePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A job that does not run yet: `replicas` copies of each state (0: all ranks hold the same), mirrors or not.

    `checkpoint_every` steps (0: never) bounds what is done again. `spare` nodes hold standbys only.
    """

    world: int
    per_node: int
    standby: int = 0
    replicas: int = 0
    mirrors: bool = False
    checkpoint_every: int = 0
    spare: int = 0
    restarts: int = 3
    waits: bool = False


def plan_coverage(files: tuple[str, ...], plan: CoveragePlan) -> CoverageRecord:
    """The table of a job on the nodes that `files` label, in the order of their names. Raises UsageError."""
    domains = domains_of_files(files)
    nodes = tuple(sorted(domains.labels))
    if plan.world % plan.per_node:
        raise UsageError(f"{plan.world} ranks, {plan.per_node} on each node", remedy="give a multiple")
    used = plan.world // plan.per_node
    if used + plan.spare > len(nodes):
        what = f"{used + plan.spare} nodes are needed, the files label {len(nodes)}"
        raise UsageError(what, where=", ".join(files), remedy="label every node, or give a smaller --world")
    replicas = plan.replicas or plan.world
    if plan.world % replicas:
        raise UsageError(f"{replicas} replicas of {plan.world} ranks", remedy="give a divisor of --world")
    placement = dealt_placement(nodes, plan.world, per_node=plan.per_node, standby=plan.standby, domains=domains)
    shards = plan.world // replicas
    spare = dict.fromkeys(nodes[used : used + plan.spare], plan.per_node + plan.standby)
    return predict(
        msgspec.structs.replace(
            placement,
            standbys={**placement.standbys, **spare},
            replicas={rank: f"shard {rank % shards}" for rank in range(plan.world)},
            mirrors=mirror_holders(placement.ranks_by_node(), domains) if plan.mirrors else {},
            own_holders=mirror_holders(placement.ranks_by_node(), domains),
            behind=plan.checkpoint_every or None,
            restarts_left=plan.restarts,
            waits=plan.waits,
        )
    )


def told_coverage(directory: Path) -> CoverageRecord:
    """The newest table in the journal of the run in `directory`. Raises UsageError where there is none."""
    read_run(directory)
    events, _ = read_journal(directory)
    tables = [event for event in events if isinstance(event, CoverageRecord)]
    if not tables:
        remedy = "a job that runs writes it within seconds of its first step; an agent's directory has none"
        raise UsageError("no table of predicted losses in this run", where=str(directory), remedy=remedy)
    return tables[-1]


def shown(record: CoverageRecord, *, json: bool) -> str:
    """As text, or as JSON that says that it is a prediction."""
    if not json:
        return "\n".join(coverage_text(record))
    fields = {"predicted": True, **{name: getattr(record, name) for name in ("domains", "everywhere", "notes")}}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()
