"""The onset of a loss: the first collective that was entered and not completed."""

from __future__ import annotations

import pytest
from ring_writer import RingWriter

from keepstep.diagnosis.onset import onset_of_loss
from keepstep.records.ring import OpSlot, Ring, SlotStatus, decode_ring

OFFSET_NS = 10**18
PRESENT = 5  # the generation the writer puts into its header
DONE, RUNNING, QUEUED, ABORTED = SlotStatus.DONE, SlotStatus.RUNNING, SlotStatus.QUEUED, SlotStatus.ABORTED


def slot(status: SlotStatus, started_ns: int, *, op: int = 1, generation: int = PRESENT) -> OpSlot:
    finished = started_ns + 5 if status in (DONE, ABORTED) else 0
    queued = started_ns or 99
    return OpSlot(0, op, 1, 1, 0, status, 7, generation, 0, 0, 1, 4, queued, started_ns, finished, 3, 0)


def ring(*slots: OpSlot) -> Ring:
    writer = RingWriter(16, offset_ns=OFFSET_NS)
    for one in slots:
        writer.put(one)
    return decode_ring(writer.buffer)


@pytest.mark.parametrize(
    ("rings", "onset_ns"),
    [
        ([ring(slot(DONE, 10), slot(RUNNING, 20)), ring(slot(DONE, 11), slot(RUNNING, 15))], 15),
        ([ring(slot(DONE, 10), slot(ABORTED, 20), slot(ABORTED, 30))], 20),
        ([ring(slot(QUEUED, 0))], 99),
        ([ring(slot(RUNNING, 2, op=11), slot(RUNNING, 20))], 20),
        ([ring(slot(ABORTED, 2, generation=PRESENT - 1), slot(RUNNING, 20))], 20),
    ],
)
def test_the_first_unfinished_collective(rings, onset_ns):
    assert onset_of_loss(rings) == (onset_ns + OFFSET_NS) / 1e9


@pytest.mark.parametrize("rings", [[], [ring()], [ring(slot(DONE, 10)), ring(slot(DONE, 12))]])
def test_unknown_where_every_collective_is_complete(rings):
    assert onset_of_loss(rings) == 0.0


def test_the_newest_slots_are_enough():
    writer = RingWriter(64, offset_ns=OFFSET_NS)
    for number in range(100):
        writer.put(slot(DONE, number + 1))
    writer.put(slot(RUNNING, 500))
    tail = decode_ring(writer.buffer, newest=8)
    assert len(tail.operations) == 8 and onset_of_loss([tail]) == (500 + OFFSET_NS) / 1e9
