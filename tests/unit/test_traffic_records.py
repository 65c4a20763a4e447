"""Which recorder rings of a run directory say what the run sent."""

from __future__ import annotations

import pytest
from ring_writer import RingWriter

from keepstep.errors import UsageError
from keepstep.records.events import JobStarted, OrderRecord
from keepstep.records.messages import StartMember
from keepstep.records.ring import OpSlot, PeerSlot, SlotStatus
from keepstep.service.traffic_records import observed_run, rings_of
from keepstep.store.journal import Journal

HOSTS = ["h0", "h1"]


def keep(path, rank: int, *, steps: range, sent: int = 1000) -> None:
    """A ring of one of two ranks that send each other `sent` bytes in each of `steps`, 10 ms apart."""
    ring = RingWriter(256, rank=rank, member=b"m%d" % rank)
    ring.put_group(0, b"dp", group_hash=77, counts=(9, 9, 9), size=2)
    for step in steps:
        begin = 10_000_000 * (step + 1)
        peer = PeerSlot(0, 0, 1 - rank, 1, sent, sent, 0, 0, 200_000, 300_000)
        times = (begin, begin + 1_000_000, begin + 2_000_000)
        slot = OpSlot(0, 1, 2, 0, 0, SlotStatus.DONE, 77, 5, step, step, 250, 1000, *times, rank, 0, (peer,))
        ring.put(slot)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ring.buffer)


def test_a_run_without_a_loss_is_observed_by_the_rings_of_its_end(tmp_path):
    for rank in (0, 1):
        keep(tmp_path / "rings" / f"rank{rank}.ring", rank, steps=range(12))
    found = observed_run(tmp_path, job="j", hosts=HOSTS)
    assert (found.steps, found.demand.uses[0].measured_bytes) == (10, ((0, 1, 1000.0), (1, 0, 1000.0)))


def test_rings_of_the_end_go_before_fuller_ones_of_a_loss(tmp_path):
    """Of the rank that was replaced the fullest ring ends at the loss, that of the other begins after it."""
    keep(tmp_path / "incidents" / "1" / "m0.ring", 0, steps=range(20))
    keep(tmp_path / "incidents" / "1" / "m1.ring", 1, steps=range(20))
    keep(tmp_path / "rings" / "rank0.ring", 0, steps=range(20, 50), sent=2000)
    keep(tmp_path / "rings" / "rank1.ring", 1, steps=range(20, 30), sent=2000)
    found = observed_run(tmp_path, job="j", hosts=HOSTS)
    assert (found.steps, found.demand.uses[0].measured_bytes[0]) == (8, (0, 1, 2000.0))


@pytest.mark.parametrize("last", [range(20, 22), None])
def test_a_loss_tells_where_the_end_does_not(tmp_path, last):
    """A joiner made two steps, or has no ring of its end."""
    for rank in (0, 1):
        keep(tmp_path / "incidents" / "1" / f"m{rank}.ring", rank, steps=range(20))
    keep(tmp_path / "rings" / "rank0.ring", 0, steps=range(10, 22))
    if last is not None:
        keep(tmp_path / "rings" / "rank1.ring", 1, steps=last)
    assert observed_run(tmp_path, job="j", hosts=HOSTS).steps == 18


def test_a_parent_of_all_directories_of_a_run_has_its_journal_and_rings(tmp_path):
    """The controller's directory has the journal, those of the agents the rings; m1 took the place of another."""
    starts = [("m0", 0, "nodeB"), ("m9", 1, "nodeC"), ("m1", 1, "nodeA")]
    journal = Journal.open(tmp_path / "controller")
    journal.append(JobStarted(job="j", script="s.py", world=2))
    for member, rank, node in starts:
        journal.append(OrderRecord(job="j", node=node, order=StartMember(1, member, rank, 0, 0, {})))
    journal.close()
    for rank in (0, 1):
        keep(tmp_path / f"agent{rank}" / "rings" / f"rank{rank}.ring", rank, steps=range(12))
    found = observed_run(tmp_path, job="j")
    assert [(seat.rank, seat.host) for seat in found.demand.seats] == [(0, "nodeB"), (1, "nodeA")]
    (tmp_path / "controller" / "journal.jsonl").rename(tmp_path / "else.jsonl")
    with pytest.raises(UsageError, match="no journal of a job below it"):
        observed_run(tmp_path, job="j")


def test_a_directory_without_rings_and_none(tmp_path):
    with pytest.raises(UsageError, match="no recorder ring below it"):
        rings_of(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        rings_of(tmp_path / "none")
