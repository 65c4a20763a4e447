"""What must come out: the states of an uninterrupted run, and the checkers that see everything at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

__all__ = ["Layout", "Truth", "Violation", "digest_of"]


class Violation(AssertionError):
    """Something happened that must never happen."""


def digest_of(*parts: object) -> str:
    """A short hash of `parts`: the simulation's arithmetic."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Layout(msgspec.Struct, frozen=True):
    """Who holds what: ranks with equal `rank % shards` hold equal state. shards=1: plain data parallel."""

    world: int
    shards: int

    def replica(self, rank: int) -> str:
        """The name of the set of ranks that hold the same state as `rank`."""
        return f"shard{rank % self.shards}"

    def initial_state(self, base: str, rank: int) -> str:
        """The state after a set-up in which rank 0 handed `base` to all."""
        return digest_of("state", base, self.replica(rank))

    def gradient(self, state: str, private: str, *, rank: int) -> str:
        """What `rank` gives to the step's reduction."""
        return digest_of("gradient", state, private, rank)

    def updated(self, state: str, reduced: str) -> str:
        """The state after the update."""
        return digest_of("update", state, reduced)


class Truth:
    """The hash chains of an uninterrupted run, and what has been seen of the real one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._states = [{rank: layout.initial_state(self.base(0), rank) for rank in range(layout.world)}]
        self._holders: dict[tuple[int, int], str] = {}
        self._calls: dict[tuple[int, int], tuple[str, int]] = {}
        self._installed: dict[str, int] = {}
        self.fenced_at: dict[str, int] = {}

    @staticmethod
    def base(rank: int) -> str:
        """What the process of `rank` draws in its set-up."""
        return digest_of("base", rank)

    def private(self, rank: int, version: int) -> str:
        """Random state and data position of `rank` after `version` steps."""
        return digest_of("private", rank, version)

    def state(self, rank: int, version: int) -> str:
        """The state of `rank` after `version` steps."""
        while len(self._states) <= version:
            last, number = self._states[-1], len(self._states) - 1
            given = {r: self.layout.gradient(last[r], self.private(r, number), rank=r) for r in last}
            reduced = self.reduced(given)
            self._states.append({rank: self.layout.updated(last[rank], reduced) for rank in last})
        return self._states[version][rank]

    @staticmethod
    def reduced(given: Mapping[int, str]) -> str:
        """The step's reduction over what each rank gave."""
        return digest_of("sum", sorted(given.items()))

    # ------------------------------------------------------------ checkers

    def check_state(self, rank: int, version: int, *, state: str, private: str, where: str) -> None:
        """G-2: at every boundary every member holds what an uninterrupted run would give it."""
        if state != self.state(rank, version):
            raise Violation(f"{where}: rank {rank} has a wrong state at version {version}")
        if private != self.private(rank, version):
            raise Violation(f"{where}: rank {rank} has a wrong random state or data position at version {version}")

    def check_call(self, member: str, rank: int, *, generation: int, sequence: int, call: tuple[str, int]) -> None:
        """G-8, G-1: one member of a rank in a generation, no fenced one; all make the same call in the same step."""
        holder = self._holders.setdefault((generation, rank), member)
        if holder != member:
            raise Violation(f"{holder} and {member} both act as rank {rank} in generation {generation}")
        if generation >= self.fenced_at.get(member, generation + 1):
            raise Violation(f"fenced {member} takes part in generation {generation}")
        first = self._calls.setdefault((generation, sequence), call)
        if first != call:
            raise Violation(f"rank {rank} makes call {call} where others make {first} (generation {generation})")

    def check_install(self, member: str, generation: int) -> None:
        """G-10: generations only grow."""
        if generation <= self._installed.get(member, -1):
            raise Violation(f"{member} goes back to generation {generation}")
        self._installed[member] = generation
