"""Where the checkpoints of one member go: shared storage, the disk of its node, each with an interval of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.errors import NoValidState
from keepstep.training import private
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.private import Stream
from keepstep.training.state import TrackedState

__all__ = ["Loadable", "Tier", "Tiers"]


@dataclass(frozen=True)
class Tier:
    """One place, written after each `every` steps; `local`: it is the disk of this node."""

    writer: CheckpointWriter
    every: int
    local: bool = False


@dataclass(frozen=True)
class Loadable:
    """What one member could load: the place of every step, ascending, and the job and generation it was written in.

    Where two places have a step of different generations, that of shared storage counts: the others see it, too.
    `skipped` has a line for each step that cannot be used.
    """

    chosen: Mapping[int, tuple[Tier, str]]
    skipped: tuple[str, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self.chosen)

    @property
    def local(self) -> tuple[int, ...]:
        """Those on this node."""
        return tuple(step for step, (tier, _) in self.chosen.items() if tier.local)

    @property
    def written_in(self) -> tuple[str, ...]:
        """Job and generation of each of `steps`."""
        return tuple(written_in for _, written_in in self.chosen.values())


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

    def save(
        self, version: int, tracked: TrackedState, *, private: bytes, replicas: Mapping[int, str], written_in: str = ""
    ) -> None:
        """Have it written wherever it is due; arguments as in `CheckpointWriter.save`."""
        for tier in self._tiers:
            if version % tier.every == 0:
                tier.writer.save(version, tracked, private=private, replicas=replicas, written_in=written_in)

    def settle(self) -> None:
        """The state is about to change: wait until it is copied."""
        for tier in self._tiers:
            tier.writer.settle()

    def newest(self, version: int) -> int:
        """The newest step up to `version` that this member has written or loaded, wherever; -1: none."""
        return max((tier.writer.newest(version) for tier in self._tiers), default=-1)

    def valid_steps(self, streams: Sequence[Stream] = ()) -> Loadable:
        """What could be loaded. Steps that a stream cannot go back to are left out."""
        chosen: dict[int, tuple[Tier, str]] = {}
        skipped: list[str] = []
        for tier in self._tiers:
            found, bad = tier.writer.valid_steps()
            for step in found:
                written_in = tier.writer.written_in(step)
                if not private.within_reach(tier.writer.private(step), streams):
                    bad.append(f"step {step}: an iterator given to job.data() cannot go back there")
                elif step not in chosen or chosen[step][1] != written_in:
                    chosen[step] = tier, written_in
            skipped += [f"{line} (local disk)" if tier.local else line for line in bad]
        return Loadable({step: chosen[step] for step in sorted(chosen)}, tuple(skipped))

    def load(self, version: int, tracked: TrackedState) -> bytes:
        """Put the state of `version` into `tracked` from where `valid_steps` finds it; gives the private part.

        Raises StoreError, StateError where none has it or it does not fit.
        """
        chosen = self.valid_steps().chosen
        if version not in chosen:
            raise NoValidState(f"no checkpoint of step {version} is left", remedy="start the job again")
        return chosen[version][0].writer.load(version, tracked)

    def close(self) -> None:
        """Finish writing."""
        for tier in self._tiers:
            tier.writer.close()
