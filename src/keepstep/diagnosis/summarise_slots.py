"""A stretch of a recorder ring as arrays: thousands of slots at once, where `records.ring` decodes one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keepstep.records.ring_layout import LAYOUTS, SLOT_BYTES, SLOTS_OFFSET, Layout

__all__ = ["FIRST_POINT_TO_POINT", "Ring", "Slots", "Table", "read_slots"]

Table: TypeAlias = NDArray[Any]
"""A structured array: one row a slot."""

FIRST_POINT_TO_POINT = 10
"""Operation codes from here on are sends and receives."""

Ring = bytes | bytearray | memoryview
"""The memory of a ring."""

_OPERATION, _PEER, _SPAN = 1, 2, 3
_WORDS = SLOT_BYTES // 8
_NAMES = {"index+1": "mark"}


def _row(layout: Layout) -> np.dtype[np.void]:
    """The numpy type of a slot whose body is `layout`, the fields of all kinds included."""
    common = next(piece for piece in LAYOUTS if piece.title.startswith("Slot, "))
    fields = [*common.fields(), *layout.fields()]
    return np.dtype(
        {
            "names": [_NAMES.get(name, name) for _, _, name in fields],
            "formats": [f"<{kind[0]}{int(kind[1:]) // 8}" for _, kind, _ in fields],
            "offsets": [offset for offset, _, _ in fields],
            "itemsize": SLOT_BYTES,
        }
    )


_ROWS = {
    number: _row(next(piece for piece in LAYOUTS if f"(kind {number}" in piece.title))
    for number in (_OPERATION, _PEER, _SPAN)
}


@dataclass(frozen=True)
class Slots:
    """What stood whole in a stretch of a ring, each kind in order of index: `mark` is index + 1.

    `overtaken` counts slots that newer ones had taken before they could be read.
    """

    operations: Table
    peers: Table
    spans: Table
    overtaken: int


def read_slots(ring: Ring, first: int, *, head: int, capacity: int) -> Slots:
    """The slots `first` to `head` - 1 of a ring of `capacity` slots that may be written meanwhile.

    Takes a copy; a slot counts if its mark is right in the copy and still right behind it, so that one in mid-write
    or one that was reserved and not yet filled is left out.
    """
    start = max(first, head - capacity)
    places = np.frombuffer(ring, dtype="<u8", count=capacity * _WORDS, offset=SLOTS_OFFSET).reshape(capacity, _WORDS)
    at, behind = start % capacity, max(0, start % capacity + head - start - capacity)
    stretch = (places[at : at + head - start], places[:behind])
    rows = np.concatenate(stretch)
    again = np.concatenate([part[:, 0] for part in stretch])
    marks = np.arange(start + 1, head + 1, dtype=np.uint64)
    whole = (rows[:, 0] == marks) & (again == marks)
    kinds = np.where(whole, rows[:, 1] & 0xFF, 0)
    operations, peers, spans = (rows[kinds == kind].view(row).ravel() for kind, row in _ROWS.items())
    return Slots(operations, peers, spans, start - first + int(np.count_nonzero(again > marks)))
