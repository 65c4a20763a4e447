"""Probes of a running job: from a finding to measurements to a narrower finding that refers to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep.control.job_state import Directed
from keepstep.control.roster import Status, by_rank
from keepstep.diagnosis.probing import NodeResult, PairResult, ProbePlan, narrowed, plan_probe
from keepstep.errors import UsageError
from keepstep.records.events import Finding
from keepstep.records.finding_words import one_line
from keepstep.records.watch_messages import LinkProbed, NodeProbed, ProbeLinks, ProbeNode
from keepstep.service.controller import JobShell

__all__ = ["ProbeDesk"]

_TRANSFER_BYTES = 1 << 20
_LIMIT_S = 90.0


class _Running:
    """A probe under way: what has come in, and an event for when all is there."""

    def __init__(self, plan: ProbePlan, wanted: int) -> None:
        self.plan = plan
        self.wanted = wanted
        self.pairs: list[PairResult] = []
        self.nodes: list[NodeResult] = []
        self.complete = asyncio.Event()

    def count(self) -> None:
        if len(self.pairs) + len(self.nodes) >= self.wanted:
            self.complete.set()


class ProbeDesk:
    """The probes of one job. `numbered(n)` gives finding n, `add` journals what a probe found."""

    def __init__(
        self, shell: JobShell, *, numbered: Callable[[int], Finding | None], add: Callable[[Finding], Finding]
    ) -> None:
        """Nothing is measured until somebody asks."""
        self._shell = shell
        self._numbered = numbered
        self._add = add
        self._running: dict[int, _Running] = {}

    async def probe(self, number: int) -> str:
        """Run the probe that finding `number` names; what it left of the suspects. Raises UsageError if none fits."""
        finding = self._numbered(number)
        if finding is None:
            raise UsageError(f"there is no finding {number}", remedy="see `keepstep report` for their numbers")
        if finding.status == "ended":
            raise UsageError(
                f"finding {number} has ended: a measurement now says nothing about it",
                remedy="look at its evidence: `keepstep report` says where",
            )
        plan = plan_probe(finding, self._shell.state.spec.world)
        if plan is None:
            raise UsageError(
                f"no measurement would narrow finding {number} ({finding.kind})",
                remedy=f"by hand: {finding.next_probe}" if finding.next_probe else "see its evidence",
            )
        if plan.kind == "links" and not self._links_can_be_measured(plan):
            raise UsageError(
                f"finding {number} is about links, and the members of this job have not joined: they measure nothing",
                remedy=f"by hand: {finding.next_probe}" if finding.next_probe else "see its evidence",
            )
        if number in self._running:
            raise UsageError(f"finding {number} is being probed already", remedy="wait for the answer")
        if self._shell.state.phase not in ("running", "starting"):
            raise UsageError(f"the job is {self._shell.state.phase}", remedy="try again when it runs")
        return await self._measure(finding, plan)

    async def _measure(self, finding: Finding, plan: ProbePlan) -> str:
        running = _Running(plan, len(plan.pairs) if plan.kind == "links" else len(plan.ranks))
        self._running[finding.number] = running
        try:
            self._order(finding, plan)
            late = ""
            try:
                await asyncio.wait_for(running.complete.wait(), _LIMIT_S)
            except TimeoutError:
                late = f" ({running.wanted - len(running.pairs) - len(running.nodes)} measurements never came)"
            if not running.pairs and not running.nodes:
                raise UsageError(
                    f"nothing was measured for finding {finding.number}: no member answered in {_LIMIT_S:.0f} s",
                    remedy="see its evidence, and `keepstep report` for what else stands",
                )
            result = narrowed(finding, plan, pairs=running.pairs, nodes=running.nodes)
            now = self._numbered(finding.number)
            if now is None or now.status == "ended":
                raise UsageError(
                    f"finding {finding.number} ended while it was probed: " + "; ".join(result.evidence[1:]),
                    remedy="see `keepstep report`: these measurements say nothing about it",
                )
            found = self._add(result)
            return f"finding {found.number} (narrows {finding.number}): {one_line(found)}{late}\n" + "\n".join(
                f"  {line}" for line in found.evidence
            )
        finally:
            del self._running[finding.number]

    def _links_can_be_measured(self, plan: ProbePlan) -> bool:
        """Whether a member at an end has joined: transfers are made by members, and by no script without our lines."""
        members = by_rank(self._shell.state.members)
        ends = {rank for pair in plan.pairs for rank in pair}
        return any(members[rank].status is not Status.STARTING for rank in ends & members.keys())

    def _order(self, finding: Finding, plan: ProbePlan) -> None:
        state = self._shell.state
        members = by_rank(state.members)
        why = f"probe of finding {finding.number}"
        if plan.kind == "links":
            for rank in sorted({rank for pair in plan.pairs for rank in pair} & members.keys()):
                order = ProbeLinks(state.epoch, finding.number, plan.pairs, _TRANSFER_BYTES)
                self._shell.order(Directed(members[rank].node, members[rank].name, order, why))
            return
        for rank in plan.ranks:
            if rank in members:
                self._shell.order(
                    Directed(members[rank].node, "", ProbeNode(state.epoch, finding.number, plan.kind, rank), why)
                )

    def take(self, fact: LinkProbed | NodeProbed) -> None:
        """One measurement; one that nobody waits for is dropped."""
        running = self._running.get(fact.finding)
        if running is None:
            return
        if isinstance(fact, LinkProbed):
            result = PairResult(fact.source, fact.destination, fact.latency_s, fact.bytes_per_s, fact.why)
            running.pairs.append(result)
        else:
            running.nodes.append(NodeResult(fact.rank, fact.node, fact.value, fact.unit, fact.note))
        running.count()
