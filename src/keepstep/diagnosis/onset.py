"""When a loss began to show: the first collective that left its pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.records.ring import OpSlot, Ring, SlotStatus

__all__ = ["onset_of_loss"]

_FIRST_POINT_TO_POINT = 10
"""Operation codes from here on are sends and receives, which may be posted long before they are due."""


def onset_of_loss(rings: Iterable[Ring]) -> float:
    """Wall-clock time at which the first unfinished collective of the present generation began; 0.0 if there is none.

    Such a collective was entered by a member and never completed: it waited for the lost one. Where every collective
    is complete the loss fell between two of them, and the time of its detection is the best onset, which is before
    the next collective.
    """
    return min((began for ring in rings for began in _unfinished(ring)), default=0.0)


def _unfinished(ring: Ring) -> Iterator[float]:
    offset = ring.header.offset_ns
    for slot in ring.operations:
        if slot.generation == ring.header.generation and slot.op < _FIRST_POINT_TO_POINT and _broken(slot):
            yield ((slot.started_ns or slot.queued_ns) + offset) / 1e9


def _broken(slot: OpSlot) -> bool:
    return slot.status is not SlotStatus.DONE and bool(slot.started_ns or slot.queued_ns)
