"""Where copies of states are kept in host memory: for each rank at most two versions, whole ones only.

A new version takes the room of the older one; the newer one stays untouched until the new one is whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.records.mirror_messages import HeldMirror
from keepstep.training.host_memory import Block
from keepstep.training.manifest import Image, Manifest

__all__ = ["KeptState", "Shelf"]


@dataclass(frozen=True)
class KeptState:
    """The state of `rank` after `version` updates: `block` holds the bytes of all chunks of `manifest`, in order.

    `private` is what only that rank knows; `generation` is the one in which the copy was made.
    """

    rank: int
    version: int
    generation: int
    manifest: Manifest
    digest: str
    private: bytes
    block: Block

    def views(self) -> list[memoryview]:
        """The bytes of every entry."""
        found, at = [], 0
        for entry in self.manifest.entries:
            found.append(self.block.view[at : at + entry.nbytes])
            at += entry.nbytes
        return found

    def image(self) -> Image:
        """To serve it; its digests are computed anew from what is in memory."""
        return Image(self.manifest, self.views(), keep=self.block)

    def announced(self) -> HeldMirror:
        """What is said about it."""
        return HeldMirror(self.rank, self.version, self.digest, self.manifest.replica, self.manifest.nbytes)


class Shelf:
    """The copies one process keeps, its own and other ranks'. Safe from all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, list[KeptState]] = {}
        self._spare: dict[int, Block] = {}
        self._made: weakref.WeakSet[Block] = weakref.WeakSet()

    def room(self, rank: int, nbytes: int) -> Block:
        """A block for a new version of `rank`; if two versions are there the older one gives way."""
        with self._lock:
            kept = self._kept.setdefault(rank, [])
            spare = self._spare.pop(rank, None)
            while len(kept) > 1:
                spare = kept.pop(0).block
            if spare is None or spare.nbytes != nbytes:
                spare = Block(nbytes)
                self._made.add(spare)
            return spare

    def put(self, state: KeptState) -> bool:
        """A whole copy; it takes the place of one of the same version. False: older than the newest, and dropped."""
        with self._lock:
            kept = self._kept.setdefault(state.rank, [])
            if kept and kept[-1].version > state.version:
                self._spare[state.rank] = state.block
                return False
            if kept and kept[-1].version == state.version:
                self._spare[state.rank] = kept.pop().block
            kept.append(state)
            del kept[:-2]
            return True

    def give_back(self, rank: int, block: Block) -> None:
        """The copy was not completed. Its block waits for the next one, if copies of `rank` are kept at all."""
        with self._lock:
            if self._kept.get(rank):
                self._spare[rank] = block

    def get(self, rank: int, version: int) -> KeptState | None:
        """The copy, if it is there."""
        with self._lock:
            return next((one for one in self._kept.get(rank, ()) if one.version == version), None)

    def versions(self, rank: int) -> tuple[int, ...]:
        """The versions of `rank`, ascending."""
        with self._lock:
            return tuple(one.version for one in self._kept.get(rank, ()))

    def all(self) -> list[KeptState]:
        """All copies."""
        with self._lock:
            return [one for kept in self._kept.values() for one in kept]

    @property
    def nbytes(self) -> int:
        """Memory that is taken, bytes: by what is kept, by what is on its way and by what waits to be used again."""
        with self._lock:
            return sum(block.nbytes for block in self._made)

    def drop_newer(self, version: int) -> None:
        """The job has gone back to `version`: what came after it did not happen."""
        self._filter(lambda one: one.version <= version)

    def drop_older_generations(self, generation: int) -> None:
        """Copies made before `generation` are not needed any more: every rank has one of it."""
        self._filter(lambda one: one.generation >= generation)

    def clear(self) -> None:
        """Nothing is kept."""
        self._filter(lambda one: False)

    def _filter(self, stays: Callable[[KeptState], bool]) -> None:
        with self._lock:
            self._kept = {rank: [one for one in kept if stays(one)] for rank, kept in self._kept.items()}
            self._kept = {rank: kept for rank, kept in self._kept.items() if kept}
            self._spare = {rank: block for rank, block in self._spare.items() if rank in self._kept}
