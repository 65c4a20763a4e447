"""Where the checkpoints of one member go: shared storage, the disk of its node, each with an interval of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.errors import NoValidState
from keepstep.training import private
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.private import Stream
from keepstep.training.state import TrackedState

__all__ = ["Tier", "Tiers"]


@dataclass(frozen=True)
class Tier:
    """One place, written after each `every` steps; `local`: it is the disk of this node."""

    writer: CheckpointWriter
    every: int
    local: bool = False


class Tiers:
    """All places, the quickest to read from first."""

    def __init__(self) -> None:
        self._tiers: list[Tier] = []

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def set(self, tiers: list[Tier]) -> None:
        """These places from now on."""
        self._tiers = sorted(tiers, key=lambda tier: not tier.local)

    def due(self, version: int) -> bool:
        """Whether a checkpoint is to be written after `version` updates."""
        return any(version % tier.every == 0 for tier in self._tiers)

    def save(self, version: int, tracked: TrackedState, *, private: bytes, replicas: Mapping[int, str]) -> None:
        """Have it written wherever it is due."""
        for tier in self._tiers:
            if version % tier.every == 0:
                tier.writer.save(version, tracked, private=private, replicas=replicas)

    def settle(self) -> None:
        """The state is about to change: wait until it is copied."""
        for tier in self._tiers:
            tier.writer.settle()

    def valid_steps(self, streams: Sequence[Stream] = ()) -> tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        """The steps that could be loaded, a line for each that is skipped, and which of the steps are on this node.

        Steps that a stream cannot go back to are skipped, too.
        """
        steps: set[int] = set()
        local: set[int] = set()
        skipped: list[str] = []
        for tier in self._tiers:
            found, bad = tier.writer.valid_steps()
            behind = [step for step in found if not private.within_reach(tier.writer.private(step), streams)]
            bad += [f"step {step}: an iterator given to job.data() cannot go back there" for step in behind]
            found = [step for step in found if step not in behind]
            steps.update(found)
            local.update(found if tier.local else ())
            skipped += [f"{line} (local disk)" if tier.local else line for line in bad]
        return tuple(sorted(steps)), tuple(skipped), tuple(sorted(local))

    def load(self, version: int, tracked: TrackedState) -> bytes:
        """Put the state of `version` into `tracked`, from the quickest place that has it; gives the private part.

        Raises StoreError, StateError where none has it or it does not fit.
        """
        for tier in self._tiers:
            if version in tier.writer.valid_steps()[0]:
                return tier.writer.load(version, tracked)
        raise NoValidState(f"no checkpoint of step {version} is left", remedy="start the job again")

    def close(self) -> None:
        """Finish writing."""
        for tier in self._tiers:
            tier.writer.close()
