"""What follows from findings while a job runs: the journal, people's console, evidence, and a check before acting.

The desk decides nothing about members: hard evidence becomes a fact for the job machine, which decides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from keepstep.control.job_state import Directed
from keepstep.control.roster import Status, by_rank, live
from keepstep.diagnosis.called import disagreements
from keepstep.diagnosis.replicas import ReplicaCheck
from keepstep.records.events import Finding
from keepstep.records.finding_words import one_line, ranks_of
from keepstep.records.messages import (
    Fact,
    MemberExited,
    MemberStopped,
    ScriptFailed,
    StateDigest,
)
from keepstep.records.watch_messages import (
    Called,
    CheckHang,
    EvidenceGiven,
    GiveEvidence,
    HangDenied,
    LinkProbed,
    MemberHung,
    MemberSlow,
    NodeProbed,
    PlainSeen,
    TellCalls,
    Watched,
)
from keepstep.service.analysis_wire import Begin, Standing
from keepstep.service.analyst import Analyst
from keepstep.service.arrivals import Arrivals
from keepstep.service.baselines import KeptBaseline, earlier_baseline, keep_baseline
from keepstep.service.bundles import BUNDLES_FOLDER, Bundles, Retention
from keepstep.service.clock import Clock
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.loss_findings import ended_by_signal, stands_still
from keepstep.service.output import Console
from keepstep.service.probe_desk import ProbeDesk
from keepstep.service.settings import Settings

__all__ = ["FindingDesk", "WatchedJob"]

_APART_S = 1.0
_CHECK_AGAIN_S = 5.0
_QUIET = frozenset({"healthy", "imbalance", "undetermined"})
_MOST_FINDINGS = 10_000
_MOST_CALLED = 1000
_log = logging.getLogger(__name__)


class WatchedJob(Protocol):
    """What the desk has to know of a job; its plan."""

    @property
    def script(self) -> str:
        """The user's script."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its arguments."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""


class FindingDesk:
    """The findings of one job from `open()` to `close()`. Give `take` to the shell: it sees every fact first."""

    def __init__(
        self, shell: JobShell, keeper: Keeper, *, plan: WatchedJob, directory: Path, clock: Clock, console: Console
    ) -> None:
        """`plan.settings` say whether members are replaced on hard evidence and how much evidence stays."""
        settings = plan.settings
        earlier = earlier_baseline(directory, script=plan.script, arguments=plan.arguments)
        spec = shell.state.spec
        self.analyst = Analyst(
            Begin(spec.job, spec.world, settings.hang_s, earlier.run, earlier.data),
            self._on_change,
            clock=clock,
            log=directory / "logs" / "analysis.log",
        )
        self.analyst.arrivals = lambda: self._starts.notes(shell.state.phase)
        self.analyst.retired = self._retired
        self.probes = ProbeDesk(
            shell, numbered=self.numbered, add=lambda f: self.add(f, key=f"probe:{self._count}:{f.refers}")
        )
        self._directory = directory
        self._shell = shell
        self._keeper = keeper
        self._acts = settings.on_hang == "replace"
        self._clock = clock
        self._console = console
        self._bundles = Bundles(directory, Retention(settings.keep_findings, settings.evidence_bytes))
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._findings: dict[str, Finding] = {}
        self._told: dict[int, Finding] = {}
        self._checked: dict[str, float] = {}
        self._replicas = ReplicaCheck()
        self._called: deque[Called] = deque(maxlen=_MOST_CALLED)
        self._starts = Arrivals(spec.world, spec.keepstep_version)
        self._say: Callable[[str], None] = lambda text: console.say(f"keepstep: {text}", error=True)

    def take(self, fact: Fact, *, node: str, member: str) -> bool:
        """Look at a fact before the job machine does; True if it is not for that."""
        match fact:
            case Watched() | PlainSeen():
                self.analyst.take(fact.report)
            case EvidenceGiven():
                self._bundles.put_evidence(node, fact)
            case HangDenied():
                self._denied(fact)
            case LinkProbed() | NodeProbed():
                self.probes.take(fact)
            case Called():
                self._called.append(fact)
                self._compare_calls()
            case StateDigest():
                if (news := self._replicas.note(fact)) is not None:
                    self._on_change(Standing(news.key, news.status, news.finding))
            case ScriptFailed():
                self._ask_calls()
                return False
            case MemberStopped() | MemberHung():
                self._note_loss(stands_still(node, fact), key=f"still:{fact.member}")
                return not self._acts
            case MemberExited() if fact.signal and fact.protected and self._is_lost(fact.member):
                self._note_loss(ended_by_signal(node, fact), key=f"crash:{fact.member}")
                self._starts.note(fact, node=node, member=member, now=self._clock.wall())
                return False
            case _:
                for standing in self._starts.note(fact, node=node, member=member, now=self._clock.wall()):
                    self._on_change(standing)
                return False
        return True

    def words(self) -> str:
        """What stands now, for the progress line; empty if nothing does."""
        standing = [f for f in self._findings.values() if f.kind not in _QUIET]
        return "; ".join(f"finding {finding.number}: {one_line(finding)}" for finding in standing[:3])

    def numbered(self, number: int) -> Finding | None:
        """The last word on finding `number`, also if it has ended."""
        return self._told.get(number)

    def add(self, finding: Finding, *, key: str) -> Finding:
        """Take a finding that did not come from the live analysis; as it is in the journal."""
        self._on_change(Standing(key, "new", finding))
        return self._findings[key]

    async def close(self) -> None:
        """A last look, and the end of everything."""
        await self.analyst.close()
        keep_baseline(self._directory, KeptBaseline(self._shell.state.spec.job, self.analyst.baseline))
        self._bundles.close()

    # -------------------------------------------------------------- findings

    def _on_change(self, standing: Standing) -> None:
        if self._said_otherwise(standing):
            return
        known = standing.key in self._numbers
        if standing.status == "ended" and not known:
            return
        if not known and self._count >= _MOST_FINDINGS:
            return
        if not known:
            self._count += 1
            self._numbers[standing.key] = self._count
        elif standing.status == "new":  # a new analysis says again what stands
            standing = msgspec.structs.replace(standing, status="updated")
        number = self._numbers[standing.key]
        finding = self._journalled(standing, number)
        if standing.status == "ended":
            self._findings.pop(standing.key, None)
            del self._numbers[standing.key]  # should it come again, it is another one
            self._tell(finding, f"finding {number} has ended: {one_line(finding)}")
            return
        self._findings[standing.key] = finding
        if not known:
            self._tell(finding, f"finding {number}: {one_line(finding)}")
            self._ask_evidence(finding)
        if standing.hard and finding.kind == "compute_slow":
            self._act_on_slow(finding)
        elif standing.hard:
            self._check(standing.key, finding)

    def _said_otherwise(self, standing: Standing) -> bool:
        """Whether the calls of the members have told this mismatch already, in more words."""
        mismatch = standing.finding.kind == "collective_mismatch" and standing.key not in self._numbers
        return mismatch and any(f.kind == "collective_mismatch" for f in self._findings.values())

    def _tell(self, finding: Finding, text: str) -> None:
        """What is no alarm is for the journal and the log only."""
        if finding.kind in _QUIET:
            _log.debug("%s", text)
        else:
            self._say(text)

    def _journalled(self, standing: Standing, number: int) -> Finding:
        state = self._shell.state
        bundle = "" if standing.finding.kind in _QUIET else f"{BUNDLES_FOLDER}/{number}"
        finding = msgspec.structs.replace(
            standing.finding,
            job=state.spec.job,
            attempt=state.attempt,
            generation=state.generation,
            wall=self._clock.wall(),
            number=number,
            status=standing.status,
            bundle=bundle,
        )
        self._keeper.keep(finding, durable=True)
        self._told[number] = finding
        if bundle:
            self._bundles.put_finding(finding)
        return finding

    def _ask_evidence(self, finding: Finding) -> None:
        if finding.kind in _QUIET:
            return
        members = live(self._shell.state.members)
        named = set(ranks_of(finding)) | set(finding.victims[:16])
        for node in sorted({member.node for member in members}):
            rings = tuple(m.rank for m in members if m.node == node and (m.rank in named or not named))
            order = GiveEvidence(self._shell.state.epoch, finding.number, rings)
            self._shell.order(Directed(node, "", order, f"evidence for finding {finding.number}"))

    # -------------------------------------------------------------- acting

    def _check(self, key: str, finding: Finding) -> None:
        """Have the agent look twice at the one suspect; what it confirms comes back as a fact."""
        ranks = ranks_of(finding)
        now = self._clock.monotonic()
        if not self._acts or len(ranks) != 1 or now - self._checked.get(key, float("-inf")) < _CHECK_AGAIN_S:
            return
        member = by_rank(self._shell.state.members).get(ranks[0])
        if member is None or self._shell.state.exit_code is not None:
            return
        self._checked[key] = now
        order = CheckHang(self._shell.state.epoch, member.name, finding.wall, _APART_S)
        self._shell.order(Directed(member.node, "", order, f"hard evidence for finding {finding.number}?"))

    def _act_on_slow(self, finding: Finding) -> None:
        """A member that cannot be replaced by itself has held the others up for long: the machine decides."""
        member = by_rank(self._shell.state.members).get(finding.rank if finding.rank is not None else -1)
        if self._acts and member is not None:
            why = "; ".join(finding.evidence[:2])
            self._shell.feed(MemberSlow(member.name, member.rank, why), node=member.node, member=member.name)

    def _note_loss(self, finding: Finding, *, key: str) -> None:
        """A rank is lost by hard evidence: a finding, unless the analysis has it already."""
        lone = ranks_of(finding)
        if lone[0] >= 0 and not any(ranks_of(known) == lone for known in self._findings.values()):
            self._on_change(Standing(key, "new", finding))

    def _is_lost(self, name: str) -> bool:
        """Whether the end of a process is nobody's order."""
        state = self._shell.state
        member = state.members.get(name)
        wanted = state.phase in ("ending", "restarting", "done")
        return not wanted and member is not None and member.status not in (Status.FENCED, Status.GONE)

    def _denied(self, fact: HangDenied) -> None:
        """Nobody is replaced; what the check saw becomes part of the finding."""
        for key, finding in self._findings.items():
            if ranks_of(finding) != (fact.rank,) or key not in self._checked:
                continue
            evidence = f"rank {fact.rank} was not replaced: {fact.why}"
            if evidence not in finding.evidence:
                self._say(evidence)
                layer = "application" if "lock of the script" in fact.why else finding.layer
                changed = msgspec.structs.replace(finding, evidence=(*finding.evidence, evidence), layer=layer)
                self._findings[key] = self._journalled(Standing(key, "updated", changed), finding.number)

    # -------------------------------------------------------------- who called what

    def _ask_calls(self) -> None:
        """A script failed: perhaps because members did not agree on a collective."""
        epoch = self._shell.state.epoch
        for node in sorted({member.node for member in live(self._shell.state.members)}):
            self._shell.order(Directed(node, "", TellCalls(epoch), "a script failed: who called what?"))

    def _compare_calls(self) -> None:
        for finding in disagreements(self._called):
            key = f"calls:{finding.group}"
            known = self._findings.get(key)
            if known is not None and (known.suspects, known.evidence) == (finding.suspects, finding.evidence):
                continue
            self._on_change(Standing(key, "updated" if known else "new", finding))

    def _retired(self) -> tuple[int, ...]:
        """Ranks that nobody can hear: all in a membership change, and those that have made their last step."""
        state = self._shell.state
        steady = state.phase == "running" and state.change is None
        working = {m.rank for m in live(state.members) if steady and m.status is not Status.FINISHED}
        return tuple(rank for rank in range(state.spec.world) if rank not in working)
