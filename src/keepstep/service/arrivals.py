"""How the ranks of an attempt started: noted from facts; judged at once where members disagree."""

from __future__ import annotations

import msgspec

from keepstep.diagnosis.arrival import Arrival, ArrivalFacts, judge_arrivals
from keepstep.records.events import Finding, FindingKind, Suspect
from keepstep.records.messages import Fact, Hello, MemberExited, MemberStarted
from keepstep.service.analysis_wire import Standing

__all__ = ["Arrivals", "judged"]


def judged(notes: tuple[Arrival, ...], world: int, *, now: float) -> dict[str, Finding]:
    """What is wrong with these starts at wall-clock time `now`, by a key that stays the same."""
    facts = ArrivalFacts(world=world, ranks=notes)
    return {_key(finding): finding for finding in judge_arrivals(facts, now)}


def _key(finding: Finding) -> str:
    return f"start:{finding.kind}:{msgspec.json.encode(finding.suspects).decode()}"


def _unlike_controller(rank: int, version: str, *, own: str) -> Finding:
    """A rank of another version than the controller's, however many have come: the job ends for it."""
    return Finding(
        kind="startup_disagrees",
        layer="configuration",
        suspects=((Suspect(rank=rank),),),
        confidence=0.95,
        evidence=(f"rank {rank} runs keepstep {version}, the controller {own}",),
        next_probe=f"environment and installation of rank {rank}",
    )


class Arrivals:
    """The starts of the present attempt of a job of `world` ranks; `version` is the controller's ("": not compared)."""

    def __init__(self, world: int, version: str = "") -> None:
        """Nobody was started yet."""
        self._world = world
        self._version = version
        self._notes: dict[str, Arrival] = {}

    def note(self, fact: Fact, *, node: str, member: str, now: float, ordered: bool = False) -> list[Standing]:
        """Take a fact; what it shows that cannot wait: the job ends at once where members disagree, and starts again
        where one dies.

        `ordered`: the job ends or starts again, so that the end of a process is nothing of its own.
        """
        match fact:
            case MemberStarted() if fact.rank >= 0:
                self._notes[fact.member] = Arrival(fact.rank, node, now)
            case Hello() if member in self._notes:
                self._notes[member] = msgspec.structs.replace(
                    self._notes[member],
                    arrived=now,
                    world=fact.world,
                    keepstep_version=fact.keepstep_version,
                    torch_version=fact.torch_version,
                )
                if self._version and fact.keepstep_version != self._version:
                    odd = _unlike_controller(self._notes[member].rank, fact.keepstep_version, own=self._version)
                    return [Standing(_key(odd), "new", odd)]
                return self._now("startup_disagrees", now)
            case MemberExited() if fact.member in self._notes and not ordered:
                code = 128 + fact.signal if fact.signal else fact.code
                self._notes[fact.member] = msgspec.structs.replace(self._notes[fact.member], exited=code)
                if code and self.joined:
                    return self._now("startup_died", now)
        return []

    def _now(self, kind: FindingKind, now: float) -> list[Standing]:
        """What of that kind is wrong with these starts."""
        found = judged(tuple(self._notes.values()), self._world, now=now)
        return [Standing(key, "new", finding) for key, finding in found.items() if finding.kind == kind]

    @property
    def joined(self) -> bool:
        """Whether anybody has joined while these starts were noted: the script has keepstep's lines."""
        return any(note.arrived is not None for note in self._notes.values())

    def notes(self, phase: str) -> tuple[Arrival, ...]:
        """The starts while the job is in a `phase` in which not all ranks have arrived; nothing once they have.

        A script without keepstep's lines never arrives: where nobody has, there is nothing to judge.
        """
        if phase not in ("starting", "ending"):
            self._notes.clear()
        return tuple(self._notes.values()) if self.joined else ()
