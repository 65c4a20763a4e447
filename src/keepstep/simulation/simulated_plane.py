"""A twin of the data plane: collectives that all members of a generation make together, losses and their news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from keepstep.simulation.engine import Engine
from keepstep.simulation.truth import Truth

__all__ = ["SimulatedFabric", "SimulatedPlane"]

_WIRE_S = 0.001
_NEWS_S = 0.002


class SimulatedFabric:
    """One member's end of the plane; behaves as `training.fabric.Fabric` does. `wake` runs when something happened."""

    def __init__(self, plane: SimulatedPlane, member: str, *, rank: int, generation: int) -> None:
        self.member = member
        self.rank = rank
        self.generation = generation
        self.roster: Mapping[int, str] = {}
        self.poisoned = False
        self.local = False
        self.closed = False
        self.results: dict[int, str] = {}
        self.on_loss: Callable[[int], None] = lambda rank: None
        self.wake: Callable[[], None] = lambda: None
        self._plane = plane
        self._sequence = 0
        self._lost: set[int] = set()
        self._early: set[tuple[int, int]] = set()

    def install(self, generation: int, roster: Mapping[int, str]) -> None:
        """Take a new generation; links to members that are dead by now break at once."""
        self._plane.truth.check_install(self.member, generation)
        self.generation, self.roster = generation, dict(roster)
        self.poisoned = self.local = False
        self.results, self._sequence = {}, 0
        self._lost.clear()
        early = [rank for told, rank in self._early if told == generation]
        self._early.clear()
        for rank in early:
            self.lose(rank)
        self._plane.look_for_dead(self)

    def poison(self) -> None:
        """All pending and later collectives end at once."""
        self.poisoned = True
        self.wake()

    def call(self, kind: str, given: str, *, step: int) -> int:
        """Begin a collective in which every rank gives something; returns its sequence number."""
        sequence = self._sequence
        self._sequence += 1
        self._plane.contribute(self, sequence, call=(kind, step), given=given)
        return sequence

    @property
    def next_sequence(self) -> int:
        """The number of the collective that comes next."""
        return self._sequence

    def heard(self, generation: int, rank: int) -> None:
        """News of a loss from another member."""
        if generation == self.generation:
            self.lose(rank)
        elif generation > self.generation:
            self._early.add((generation, rank))

    def lose(self, rank: int) -> None:
        """A link to `rank` broke: once in a generation; tell everybody."""
        if rank in self._lost or self.closed or self.local:
            return
        self._lost.add(rank)
        self.poison()
        self._plane.spread(self, rank)
        self.on_loss(rank)


class SimulatedPlane:
    """All members' ends. A frozen member's end gets news when it wakes up (`ends` says how)."""

    def __init__(self, engine: Engine, truth: Truth, *, world: int) -> None:
        self.truth = truth
        self._engine = engine
        self._world = world
        self._ends: dict[str, SimulatedFabric] = {}
        self._dead: set[str] = set()
        self._left: set[str] = set()
        self._given: dict[tuple[int, int], dict[int, tuple[SimulatedFabric, str]]] = {}
        self.when_awake: Callable[[str, Callable[[], None]], None] = lambda member, action: action()

    def join(self, fabric: SimulatedFabric) -> None:
        """A member's end is there."""
        self._ends[fabric.member] = fabric

    def contribute(self, fabric: SimulatedFabric, sequence: int, *, call: tuple[str, int], given: str) -> None:
        """One member's part; when all have given theirs each gets the result after its own delay.

        A broadcast's root (rank 0) and nobody else is through at once.
        """
        where = {"generation": fabric.generation, "sequence": sequence}
        self.truth.check_call(fabric.member, fabric.rank, call=call, **where)
        parts = self._given.setdefault((fabric.generation, sequence), {})
        parts[fabric.rank] = (fabric, given)
        if call[0] == "broadcast":
            self._hand_out_broadcast(parts, sequence, generation=fabric.generation)
        elif len(parts) == self._world:
            result = self._result(call[0], {rank: part for rank, (_, part) in parts.items()})
            for end, _ in parts.values():
                self._deliver(end, sequence, generation=fabric.generation, result=result)

    def _result(self, kind: str, parts: dict[int, str]) -> str:
        """What all get: the words of an agreement, the lowest vote, else the sum."""
        if kind == "agree":
            return "|".join(part for _, part in sorted(parts.items()) if part)
        return min(parts.values()) if kind == "vote" else self.truth.reduced(parts)

    def _hand_out_broadcast(
        self, parts: Mapping[int, tuple[SimulatedFabric, str]], sequence: int, *, generation: int
    ) -> None:
        if 0 in parts:
            for end, _ in parts.values():
                self._deliver(end, sequence, generation=generation, result=parts[0][1])

    def _deliver(self, end: SimulatedFabric, sequence: int, *, generation: int, result: str) -> None:
        def arrive() -> None:
            if end.generation == generation and not end.poisoned:
                end.results[sequence] = result
                end.wake()

        self._engine.at(self._engine.delay(_WIRE_S), lambda: self.when_awake(end.member, arrive))

    # ------------------------------------------------------------ losses

    def die(self, member: str) -> None:
        """A process is gone: the links of all that know it break, unless it has left in good order."""
        if member in self._left:
            return
        self._dead.add(member)
        self._ends.pop(member, None)
        for end in list(self._ends.values()):
            self.look_for_dead(end)

    def look_for_dead(self, end: SimulatedFabric) -> None:
        """Have `end` see, a moment later, which members of its roster are dead."""
        for rank, member in end.roster.items():
            if member in self._dead:
                self._later(end, partial(self._broken, end, rank, member=member))

    def _broken(self, end: SimulatedFabric, rank: int, *, member: str) -> None:
        if end.roster.get(rank) == member:
            end.lose(rank)

    def leave(self, fabric: SimulatedFabric) -> None:
        """Leave in good order: nobody takes it for a loss."""
        fabric.closed = True
        self._left.add(fabric.member)
        self._ends.pop(fabric.member, None)

    def cut(self, one: str, other: str) -> None:
        """A fault: the link between two members breaks, both live."""
        ends = [self._ends[name] for name in (one, other) if name in self._ends]
        if len(ends) == 2 and ends[0].generation == ends[1].generation:
            for end, peer in (ends, ends[::-1]):
                self._later(end, partial(end.heard, peer.generation, peer.rank))

    def spread(self, fabric: SimulatedFabric, rank: int) -> None:
        """News of a loss go to all others of the generation."""
        generation = fabric.generation
        for end in list(self._ends.values()):
            if end is not fabric and not end.local and end.rank != rank:
                self._later(end, partial(end.heard, generation, rank))

    def _later(self, end: SimulatedFabric, action: Callable[[], None]) -> None:
        self._engine.at(self._engine.delay(_NEWS_S), lambda: self.when_awake(end.member, action))
