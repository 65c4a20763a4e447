"""One turn of the job machine: a working copy of the state that collects orders and reasons."""

from __future__ import annotations

import msgspec

from keepstep.control.job_state import Change, Decision, Directed, JobState, Milestone, incident_of
from keepstep.control.move_state import Move
from keepstep.control.roster import Member, live, with_member
from keepstep.records.events import PHASES, Finding, Incident
from keepstep.records.messages import Address, KillMember, Order
from keepstep.records.moves import MoveRecord

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
        self.moves: list[MoveRecord] = []

    def decision(self) -> Decision:
        """The state and orders of this turn."""
        return Decision(
            state=self.state,
            orders=tuple(self.orders),
            reason="; ".join(self.reasons),
            milestones=tuple(self.milestones),
            findings=tuple(self.findings),
            incidents=tuple(self.incidents),
            moves=tuple(self.moves),
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

    def move(self, **changes: object) -> Move:
        """Change fields of the move that is on its way; counts as an answer."""
        assert self.state.move is not None
        changed = msgspec.structs.replace(self.state.move, moved=self.now, **changes)
        self.let(move=changed)
        return changed

    @property
    def move_under_way(self) -> Move:
        """The move that is on its way; to be asked only where there is one."""
        assert self.state.move is not None
        return self.state.move

    def mark_move(self, name: str) -> None:
        """Note when the move reached something, the first time."""
        move = self.state.move
        if move is not None and name not in move.marks:
            self.move(marks={**move.marks, name: self.now})

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
