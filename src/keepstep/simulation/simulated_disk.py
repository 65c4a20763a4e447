"""A twin of the checkpoint folder that all members share: one part a rank and version."""

from __future__ import annotations

import msgspec

__all__ = ["Part", "SimulatedDisk"]


class Part(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint; `whole` is False for one that is torn or was damaged."""

    state: str
    private: str
    whole: bool = True


class SimulatedDisk:
    """Parts by rank and version. Keeps the newest `keep` whole ones of every rank, as the real writer does."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._parts: dict[int, dict[int, Part]] = {}

    def write(self, rank: int, version: int, *, part: Part) -> None:
        """Put a part there (a torn one, where its writer died)."""
        parts = self._parts.setdefault(rank, {})
        if part.whole or version not in parts:
            parts[version] = part
        if part.whole:  # a dead writer clears nothing away
            oldest = sorted(number for number in parts if parts[number].whole)[-self._keep :][0]
            self._parts[rank] = {number: one for number, one in parts.items() if number >= oldest}

    def damage(self, rank: int) -> None:
        """A fault: the newest part of `rank` loses its bits."""
        parts = self._parts.get(rank)
        if parts:
            newest = max(parts)
            parts[newest] = Part("", "", whole=False)

    def valid(self, rank: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """(versions that `rank` could load, what it skipped and why)."""
        parts = self._parts.get(rank, {})
        good = tuple(version for version in sorted(parts) if parts[version].whole)
        return good, tuple(f"the torn checkpoint of step {version}" for version in sorted(parts) if version not in good)

    def read(self, rank: int, version: int) -> Part | None:
        """The part of `rank`; None if it is not there or not whole any more."""
        part = self._parts.get(rank, {}).get(version)
        return part if part is not None and part.whole else None
