"""One turn of the job machine: a working copy of the state that collects orders and reasons."""

from __future__ import annotations

import msgspec

from keepstep.control.job_state import Change, Decision, Directed, JobState, Milestone, incident_of
from keepstep.control.roster import Member, live, with_member
from keepstep.records.events import PHASES, Finding, Incident
from keepstep.records.messages import Address, KillMember, Order

__all__ = ["GRACE_S", "Turn"]

GRACE_S = 5.0
"""What a process gets to end by itself when its job ends or restarts."""


class Turn:
    """Collects what one event leads to; `decision()` hands it over. Lives only inside `decide`."""

    def __init__(self, state: JobState, now: float) -> None:
        self.state = state
        self.now = now
        self.orders: list[Directed] = []
        self.reasons: list[str] = []
        self.milestones: list[Milestone] = []
        self.findings: list[Finding] = []
        self.incidents: list[Incident] = []

    def decision(self) -> Decision:
        """The state and orders of this turn."""
        return Decision(
            state=self.state,
            orders=tuple(self.orders),
            reason="; ".join(self.reasons),
            milestones=tuple(self.milestones),
            findings=tuple(self.findings),
            incidents=tuple(self.incidents),
        )

    def because(self, reason: str) -> None:
        """Keep a reason for the journal."""
        self.reasons.append(reason)

    def put(self, member: Member, **changes: object) -> Member:
        """Change one member in the state."""
        changed = msgspec.structs.replace(member, **changes)
        self.state = msgspec.structs.replace(self.state, members=with_member(self.state.members, changed))
        return changed

    def let(self, **changes: object) -> None:
        """Change fields of the job's state."""
        self.state = msgspec.structs.replace(self.state, **changes)

    def change(self, **changes: object) -> Change:
        """Change fields of the membership change that is on its way."""
        assert self.state.change is not None
        changed = msgspec.structs.replace(self.state.change, **changes)
        self.let(change=changed)
        return changed

    def mark(self, name: str, *, rank: int | None = None, again: bool = True) -> None:
        """Note that the repair of the losses of `rank` (None: of all) reached a phase.

        The last time counts, because a repair that is begun again goes through the later phases again; without
        `again` the first time does.
        """
        later = PHASES[PHASES.index(name) :]
        change = self.state.change
        if change is None:
            return
        lost = list(change.lost)
        for index, loss in enumerate(lost):
            if (rank is None or rank == loss.rank) and (again or name not in loss.marks):
                kept = {phase: at for phase, at in loss.marks.items() if phase not in later}
                lost[index] = msgspec.structs.replace(loss, marks={**kept, name: self.now})
                number = self.state.incidents + incident_of(change.lost, index)
                self.milestones.append(Milestone(number, name, self.now, loss.rank))
        self.change(lost=tuple(lost))

    def tell(self, member: Member, order: Order, *, reason: str) -> None:
        """Send an order to a member."""
        self.orders.append(Directed(member.node, member.name, order, reason))

    def tell_agent(self, node: str, order: Order, *, reason: str) -> None:
        """Send an order to an agent."""
        self.orders.append(Directed(node, "", order, reason))

    def kill(self, member: Member, why: str, *, grace_s: float) -> None:
        """Have the agent end a process."""
        self.tell_agent(member.node, KillMember(self.state.epoch, member.name, grace_s), reason=why)

    def addresses(self) -> dict[int, Address]:
        """The roster: where the data plane of every rank is reached."""
        return {m.rank: m.address for m in live(self.state.members) if m.address is not None}
