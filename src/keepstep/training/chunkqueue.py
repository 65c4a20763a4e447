"""Which chunks of a state are still to come: one queue that all sources work on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from keepstep.training.manifest import Chunk
from keepstep.training.statewire import MAX_CHUNKS

__all__ = ["ChunkQueue", "Unit"]

_UNIT_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Unit:
    """`count` chunks from number `first` on, asked for in one request."""

    first: int
    count: int
    nbytes: int


def _units(chunks: Sequence[Chunk], have: Container[int]) -> list[Unit]:
    """The chunks that are not there yet, in runs of about _UNIT_BYTES."""
    units: list[Unit] = []
    first, nbytes = -1, 0
    for number in range(len(chunks) + 1):
        ends = number == len(chunks) or number in have
        if first >= 0 and (ends or nbytes >= _UNIT_BYTES or number - first == MAX_CHUNKS):
            units.append(Unit(first, number - first, nbytes))
            first, nbytes = -1, 0
        if not ends:
            first = number if first < 0 else first
            nbytes += chunks[number].length
    return units


class ChunkQueue:
    """Hands out units to the threads of the sources, takes back those of a source that died."""

    def __init__(self, chunks: Sequence[Chunk], have: Container[int] = ()) -> None:
        self._waiting = deque(_units(chunks, have))
        self._open = len(self._waiting)
        self._changed = threading.Condition()

    def take(self, *, block: bool) -> Unit | None:
        """The next unit. None: nothing to do now, or (where `block`) nothing to do ever again."""
        with self._changed:
            while block and not self._waiting and self._open:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def done(self) -> None:
        """A unit arrived."""
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def back(self, units: Sequence[Unit]) -> None:
        """Units that another source must bring."""
        with self._changed:
            self._waiting.extendleft(reversed(units))
            self._changed.notify_all()

    @property
    def missing(self) -> int:
        """Units that did not arrive."""
        return self._open
