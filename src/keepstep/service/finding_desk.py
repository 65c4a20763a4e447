"""What follows from facts about members and from findings while a job runs: journal, evidence, checks before acting.

The desk decides nothing about members: hard evidence becomes a fact for the job machine, which decides.
"""

from __future__ import annotations

import signal
from collections import deque
from pathlib import Path
from typing import Protocol

from keepstep.control.job_state import Directed
from keepstep.control.roster import Status, by_rank, live
from keepstep.diagnosis.called import disagreements
from keepstep.diagnosis.replicas import ReplicaCheck
from keepstep.errors import UsageError
from keepstep.records.domain_messages import NodeLost, StateTaken
from keepstep.records.events import Finding
from keepstep.records.finding import QUIET
from keepstep.records.finding_words import ends_of, ranks_of
from keepstep.records.messages import Checkpoints, Fact, MemberExited, MemberStopped, ScriptFailed, StateDigest
from keepstep.records.watch_messages import (
    Called,
    EvidenceGiven,
    GiveEvidence,
    HangDenied,
    LinkProbed,
    MemberHung,
    MemberMoves,
    MismatchSaid,
    NodeProbed,
    PlainSeen,
    TellCalls,
    Watched,
)
from keepstep.service.analysis_wire import Begin, Standing
from keepstep.service.analyst import Analyst
from keepstep.service.arrivals import Arrivals
from keepstep.service.baselines import KeptBaseline, earlier_baseline, keep_baseline
from keepstep.service.bundles import Bundles, Retention
from keepstep.service.clock import Clock
from keepstep.service.common_faults import CommonFaults
from keepstep.service.controller import JobShell
from keepstep.service.finding_book import FindingBook
from keepstep.service.hang_desk import HangDesk
from keepstep.service.keeper import Keeper
from keepstep.service.loss_findings import (
    corrupt_checkpoint,
    ended_by_signal,
    mismatch_said,
    node_gone,
    slow_source,
    stands_still,
)
from keepstep.service.output import Console
from keepstep.service.probe_desk import ProbeDesk
from keepstep.service.settings import Settings

__all__ = ["FindingDesk", "WatchedJob"]

_MOST_CALLED = 1000
_LOSSES = ("still:", "crash:")
_LOST = ("crash", "noncommunication_hang", "startup_died", "collective_mismatch")
"""Kinds of findings that the end of a process of the same rank adds nothing to."""
_PROBE = "probe:"
_SAID = "said:mismatch"
_OF_ATTEMPT = ("calls:", "replicas:", "state:", "plain:", "start:", _SAID)
"""How the keys of findings begin that are about the processes of one attempt, and that nothing else ends."""

_ENDED_BY_ORDER = ("ending", "restarting", "done")


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
        self.analyst.after_look = self._look_after
        self._directory = directory
        self._shell = shell
        self._clock = clock
        self._bundles = Bundles(directory, Retention(settings.keep_findings, settings.evidence_bytes))
        self.book = FindingBook(
            keeper,
            lambda: shell.state,
            bundles=self._bundles,
            clock=clock,
            say=lambda text: console.say(f"keepstep: {text}", error=True),
        )
        self.probes = ProbeDesk(shell, numbered=self.book.numbered, add=self._add_probed)
        self._hangs = HangDesk(shell, acts=settings.on_hang == "replace", clock=clock)
        self._replicas = (shell.state.attempt, ReplicaCheck())
        self._common = CommonFaults(lambda: shell.state)
        self._called: deque[Called] = deque(maxlen=_MOST_CALLED)
        self._starts = Arrivals(spec.world, spec.keepstep_version)

    def take(self, fact: Fact, *, node: str, member: str) -> bool:
        """Look at a fact before the job machine does; True if it is not for that."""
        match fact:
            case Watched() | PlainSeen():
                self.analyst.take(fact.report)
            case EvidenceGiven():
                self._bundles.put_evidence(node, fact)
            case HangDenied():
                self._denied(fact)
            case MemberMoves():
                self.book.end(f"still:{fact.member}", "its process runs again")
            case MismatchSaid():
                if _SAID not in self.book.open:
                    self._on_change(Standing(_SAID, "new", mismatch_said(node, fact)))
                return False
            case LinkProbed() | NodeProbed():
                self.probes.take(fact)
            case Called():
                self._called.append(fact)
                self._compare_calls()
            case StateDigest():
                self._compare_replicas(fact)
            case MemberStopped() | MemberHung():
                self._note_loss(stands_still(node, fact), key=f"still:{fact.member}")
                return fact.rank >= 0 and not self._hangs.acts
            case _:
                self._look_at(fact, node=node, member=member)
                return False
        return True

    def _look_at(self, fact: Fact, *, node: str, member: str) -> None:
        """Facts that are for the job machine, and tell something on the way."""
        if isinstance(fact, ScriptFailed):
            self._ask_calls()
        if isinstance(fact, MemberExited) and fact.signal and self._is_lost(fact.member) and self._ended_alone(fact):
            self._note_loss(ended_by_signal(node, fact), key=f"crash:{fact.member}")
        if isinstance(fact, NodeLost):
            self._note_node(fact)
        if isinstance(fact, StateTaken) and (finding := slow_source(fact)) is not None:
            self._on_change(Standing(f"state:{fact.generation}:{fact.rank}", "new", finding))
        if isinstance(fact, Checkpoints) and (holder := self._shell.state.members.get(member)) is not None:
            self._note_skipped(fact, rank=holder.rank)
        ordered = self._shell.state.phase in _ENDED_BY_ORDER
        for standing in self._starts.note(fact, node=node, member=member, now=self._clock.wall(), ordered=ordered):
            self._on_change(standing)

    def open(self) -> None:
        """Begin to watch, after `lead()`; what an earlier controller left standing has ended."""
        self.book.end_left()
        self.analyst.open()

    async def last_look(self) -> None:
        """Have everything found that the facts so far can show."""
        await self.analyst.last_look()

    async def close(self) -> None:
        """A last look, and the end of everything."""
        await self.analyst.close()
        keep_baseline(self._directory, KeptBaseline(self._shell.state.spec.job, self.analyst.baseline))
        self._bundles.close()

    # -------------------------------------------------------------- findings

    def _on_change(self, standing: Standing) -> None:
        if self._said_otherwise(standing):
            return
        if self.book.enter(standing):
            self._ask_evidence(self.book.open[standing.key])
        if standing.status == "new" and not standing.key.startswith("domain:"):
            common = self._common.note(standing.finding, now=self._clock.wall())
            if common is not None:
                self._on_change(common)
        self._hangs.note(standing.key, self.book.open.get(standing.key), hard=standing.hard)
        self._hangs.check(self.book.open)

    def _said_otherwise(self, standing: Standing) -> bool:
        """Whether it is told already in other words: a mismatch by the calls of members, a hang by the kernel.

        Whoever waits in a call of a process that is stopped sees a link that passes no bytes: the same hang.
        """
        finding, key = standing.finding, standing.key
        if key in self.book.open or key.startswith(_PROBE):
            return False
        if finding.kind == "collective_mismatch":
            return any(known.kind == finding.kind for known in self.book.open.values())
        return any(
            (known.kind == finding.kind and ranks_of(known) == ranks_of(finding))
            or (finding.kind == "communication_hang" and set(ranks_of(known)) & set(ends_of(finding)))
            for other, known in self.book.open.items()
            if other.startswith(_LOSSES)
        )

    def _add_probed(self, finding: Finding) -> Finding:
        """Take what a probe found; as it is in the journal. Raises UsageError where no finding is taken any more."""
        key = f"{_PROBE}{finding.refers}:{self._clock.monotonic()}"
        self._on_change(Standing(key, "new", finding))
        if (found := self.book.open.get(key)) is None:
            words = "; ".join(finding.evidence)
            raise UsageError(f"the job keeps no more findings; this one is {finding.kind}: {words}")
        return found

    def _ask_evidence(self, finding: Finding) -> None:
        if finding.kind in QUIET:
            return
        members = live(self._shell.state.members)
        named = set(ranks_of(finding)) | set(finding.victims[:16])
        for node in sorted({member.node for member in members}):
            rings = tuple(m.rank for m in members if m.node == node and (m.rank in named or not named))
            order = GiveEvidence(self._shell.state.epoch, finding.number, rings)
            self._shell.order(Directed(node, "", order, f"evidence for finding {finding.number}"))

    def _look_after(self) -> None:
        """After each look of the analysis: losses that are repaired have ended, and so has what was of an earlier
        attempt; what is hard is checked."""
        state = self._shell.state
        steady = state.phase in ("running", "starting") and state.change is None
        holders = by_rank(state.members) if steady else {}
        for key, finding in list(self.book.open.items()):
            holder = holders.get(-1 if finding.rank is None else finding.rank)
            if key.startswith(_LOSSES) and holder is not None and holder.name != finding.member:
                self.book.end(key, f"{holder.name} took the place of {finding.member}")
            elif steady and key.startswith("node:"):
                self.book.end(key, "other nodes hold its ranks")
            elif steady and state.phase == "running" and key.startswith("start:"):
                self.book.end(key, "all ranks have joined")
            elif steady and key.startswith(_OF_ATTEMPT) and (finding.attempt or 0) < state.attempt:
                self.book.end(key, "the job was started again, with other processes")
                self._hangs.note(key, None, hard=False)
        self._hangs.check(self.book.open)

    # -------------------------------------------------------------- losses

    def _note_loss(self, finding: Finding, *, key: str) -> None:
        """A rank is lost by hard evidence: a finding, unless the loss of this process is one already.

        That it was slow before, or its weights odd, is another fault.
        """
        lone = ranks_of(finding)
        told = any(
            known.kind in _LOST and ranks_of(known) == lone and known.member in (None, finding.member)
            for known in self.book.open.values()
        )
        if lone[0] >= 0 and not told:
            self._on_change(Standing(key, "new", finding))

    def _ended_alone(self, fact: MemberExited) -> bool:
        """Whether a signal that ended a process says something of it: of a script without keepstep's lines, too, unless
        a library may have ended it for what another rank did."""
        return fact.protected or (fact.signal != signal.SIGABRT and not self._starts.joined)

    def _note_node(self, fact: NodeLost) -> None:
        """A node is lost: a finding, if somebody was on it and it is nobody's order."""
        state = self._shell.state
        there = [m for m in state.members.values() if m.node == fact.node and self._is_lost(m.name)]
        if there:
            ranks = tuple(sorted(m.rank for m in there if m.rank >= 0))
            self._on_change(Standing(f"node:{fact.node}:{self._clock.monotonic()}", "new", node_gone(fact, ranks)))

    def _note_skipped(self, fact: Checkpoints, *, rank: int) -> None:
        """Checkpoints whose bytes are not those that were written: each once."""
        for words in fact.skipped:
            key = f"checkpoint:{words.split(':')[0]}"
            finding = corrupt_checkpoint(rank, words)
            if finding is not None and key not in self.book.open:
                self._on_change(Standing(key, "new", finding))

    def _is_lost(self, name: str) -> bool:
        """Whether the end of a process is nobody's order."""
        state = self._shell.state
        member = state.members.get(name)
        wanted = state.phase in _ENDED_BY_ORDER
        return not wanted and member is not None and member.status not in (Status.LEAVING, Status.FENCED, Status.GONE)

    def _denied(self, fact: HangDenied) -> None:
        """Nobody is replaced; what the check saw becomes part of the finding."""
        for key, finding in list(self.book.open.items()):
            if ranks_of(finding) == (fact.rank,) and self._hangs.asked(key):
                words = f"rank {fact.rank} was not replaced: {fact.why}"
                self.book.note(key, words, layer="application" if "lock of the script" in fact.why else None)

    def _retired(self) -> tuple[int, ...]:
        """Ranks that nobody can hear: all in a membership change until they train again, and those that have made their
        last step."""
        state, change = self._shell.state, self._shell.state.change
        steady = state.phase == "running" and change is None
        again = change is not None and change.going and not change.initial
        working = {m.rank for m in live(state.members) if (steady or again) and m.status is not Status.FINISHED}
        return tuple(rank for rank in range(state.spec.world) if rank not in working)

    def _compare_replicas(self, fact: StateDigest) -> None:
        """Whether replicas are equal; what processes of an earlier attempt said counts no more."""
        attempt = self._shell.state.attempt
        if self._replicas[0] != attempt:
            self._replicas = (attempt, ReplicaCheck())
        if (news := self._replicas[1].note(fact)) is not None:
            self._on_change(Standing(news.key, news.status, news.finding))

    # -------------------------------------------------------------- who called what

    def _ask_calls(self) -> None:
        """A script failed: perhaps because members did not agree on a collective."""
        epoch = self._shell.state.epoch
        for node in sorted({member.node for member in live(self._shell.state.members)}):
            self._shell.order(Directed(node, "", TellCalls(epoch), "a script failed: who called what?"))

    def _compare_calls(self) -> None:
        for finding in disagreements(self._called):
            key = f"calls:{finding.group}"
            known = self.book.open.get(key)
            if known is not None and (known.suspects, known.evidence) == (finding.suspects, finding.evidence):
                continue
            self._on_change(Standing(key, "updated" if known else "new", finding))
