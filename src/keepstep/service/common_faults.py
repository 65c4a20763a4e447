"""Findings about several nodes that have a failure domain in common become one about that domain."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.control.common_domain import common_domains
from keepstep.control.job_state import JobState
from keepstep.control.roster import by_rank
from keepstep.records.events import Finding, Suspect
from keepstep.records.finding_words import ranks_of
from keepstep.service.analysis_wire import Standing

__all__ = ["CommonFaults"]

_WINDOW_S = 600.0
_KINDS = frozenset({"crash", "compute_slow", "noncommunication_hang"})


class CommonFaults:
    """Remembers the faulty nodes of the last ten minutes by kind; `state()` is that of the job."""

    def __init__(self, state: Callable[[], JobState]) -> None:
        self._state = state
        self._seen: dict[str, dict[str, float]] = {}
        self._homes: dict[int, str] = {}
        self._told: set[tuple[str, tuple[str, ...]]] = set()

    def note(self, finding: Finding, *, now: float) -> Standing | None:
        """A new finding at wall time `now`; what follows for a domain, if anything."""
        state = self._state()
        self._homes.update({rank: member.node for rank, member in by_rank(state.members).items()})
        if finding.kind not in _KINDS:
            return None
        seen = self._seen.setdefault(finding.kind, {})
        seen.update(dict.fromkeys(self._nodes(finding), now))
        fresh = {node: at for node, at in seen.items() if now - at <= _WINDOW_S}
        names = common_domains(fresh, self._homes.values(), domains=state.domains)
        if not names or (finding.kind, names) in self._told:
            return None
        self._told.add((finding.kind, names))
        return Standing(f"domain:{finding.kind}:{','.join(names)}", "new", self._about(finding, names, nodes=fresh))

    def _nodes(self, finding: Finding) -> set[str]:
        """The nodes it names: of its suspected ranks, and its own; none where suspects are not of one mind."""
        if any(len({s.rank if s.rank is not None else s.node for s in group}) > 1 for group in finding.suspects):
            return set()
        named = {s.node for group in finding.suspects for s in group if s.node}
        found = {*named, *(self._homes[rank] for rank in ranks_of(finding) if rank in self._homes)}
        return found or ({finding.node} if finding.node else set())

    @staticmethod
    def _about(finding: Finding, names: tuple[str, ...], *, nodes: dict[str, float]) -> Finding:
        what = f"{finding.kind} on nodes {', '.join(sorted(nodes))}"
        return Finding(
            kind=finding.kind,
            layer="software_library" if all(name.startswith("release=") for name in names) else "undetermined",
            suspects=(tuple(Suspect(domain=name) for name in names),),
            confidence=0.9 if len(names) == 1 else 0.8,
            evidence=(f"{what}, which have {' and '.join(names)} in common; not all nodes of the job have",),
            next_probe="move a rank to a node outside and see whether it is well there",
        )
