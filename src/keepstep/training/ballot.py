"""Small numbers that ride on the agreement: every member says one of each, all learn the least of each."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Ballot"]


class Ballot:
    """The votes of one member. All members must have added the same names, in the same order, before an agreement."""

    def __init__(self) -> None:
        self._votes: dict[str, Callable[[], int]] = {}
        self._least: dict[str, int] = {}

    def add(self, name: str, vote: Callable[[], int]) -> None:
        """`vote()` is asked at every agreement, in the training thread; 32 bits, signed."""
        self._votes[name] = vote

    def cast(self) -> list[int]:
        """What this member says now, in the order of the names."""
        return [vote() for vote in self._votes.values()]

    def count(self, least: tuple[int, ...]) -> None:
        """The least of each over all members; nothing if the agreement did not pass."""
        self._least = dict(zip(self._votes, least, strict=True)) if least else {}

    def least(self, name: str) -> int | None:
        """What the last agreement found; None if it did not pass."""
        return self._least.get(name)
