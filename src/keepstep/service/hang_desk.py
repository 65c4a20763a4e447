"""From hard evidence to an act: a check on the node of the suspect, or links made anew where one is dead.

What a check confirms, and which link is dead, are facts for the job machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.control.job_state import Directed
from keepstep.control.roster import by_rank
from keepstep.records.events import Finding
from keepstep.records.finding_words import ends_of, ranks_of
from keepstep.records.messages import PeerLostReport
from keepstep.records.watch_messages import CheckHang, MemberSlow
from keepstep.service.clock import Clock
from keepstep.service.controller import JobShell

__all__ = ["HangDesk"]

_APART_S = 1.0
_CHECK_AGAIN_S = 5.0


class HangDesk:
    """The checks of one job. Nothing is checked, and nobody replaced, unless `acts`."""

    def __init__(self, shell: JobShell, *, acts: bool, clock: Clock) -> None:
        """`acts` is what the settings say."""
        self.acts = acts
        self._shell = shell
        self._clock = clock
        self._hard: set[str] = set()
        self._checks: dict[str, tuple[float, float]] = {}

    def asked(self, key: str) -> bool:
        """Whether a check was made for the finding of that key."""
        return key in self._checks

    def note(self, key: str, finding: Finding | None, *, hard: bool) -> None:
        """Whether the finding of that key is hard evidence now (None: it has ended)."""
        self._hard.discard(key)
        if finding is None:
            self._checks.pop(key, None)
        elif hard and self.acts and finding.kind == "compute_slow":
            self._slow(finding)
        elif hard and self.acts:
            self._hard.add(key)

    def check(self, findings: Mapping[str, Finding]) -> None:
        """Check what is hard evidence: at once, and again later and later while checks deny it."""
        now = self._clock.monotonic()
        for key in self._hard & findings.keys():
            due, pause_s = self._checks.get(key, (float("-inf"), _CHECK_AGAIN_S))
            if now >= due and self._act_on(findings[key]):
                self._checks[key] = (now + pause_s, 2 * pause_s)

    def _act_on(self, finding: Finding) -> bool:
        return self._renew(finding) if finding.kind == "communication_hang" else self._look_twice(finding)

    def _renew(self, finding: Finding) -> bool:
        """Have all links made anew, because one between nodes passes nothing: the next ones may take another way. Only
        in a membership that has made a step, so that a link that stays dead is tried once."""
        state = self._shell.state
        holders = by_rank(state.members)
        ends = [holders[rank] for rank in ends_of(finding) if rank in holders]
        steady = state.phase == "running" and state.change is None and state.move is None
        if not steady or state.exit_code is not None or len({member.node for member in ends}) < 2:
            return False
        lost = PeerLostReport(state.generation, ends[-1].rank)
        self._shell.feed(lost, node=ends[0].node, member=ends[0].name)
        return True

    def _look_twice(self, finding: Finding) -> bool:
        """Have the agent of the one suspect look twice at it; what it confirms comes back as a fact."""
        ranks = ranks_of(finding)
        member = by_rank(self._shell.state.members).get(ranks[0]) if len(ranks) == 1 else None
        if member is None or self._shell.state.exit_code is not None:
            return False
        order = CheckHang(self._shell.state.epoch, member.name, finding.wall, _APART_S)
        self._shell.order(Directed(member.node, "", order, f"hard evidence for finding {finding.number}?"))
        return True

    def _slow(self, finding: Finding) -> None:
        """A member that cannot be replaced by itself has held the others up for long: the machine decides."""
        member = by_rank(self._shell.state.members).get(finding.rank if finding.rank is not None else -1)
        if member is not None:
            why = "; ".join(finding.evidence[:2])
            self._shell.feed(MemberSlow(member.name, member.rank, why), node=member.node, member=member.name)
