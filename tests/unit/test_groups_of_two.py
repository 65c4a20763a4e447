"""Groups of two members, and messages: bytes that were swallowed on their way are not the fault of who waits."""

from __future__ import annotations

import pytest
from diagnosed_text import status, timeout
from ring_writer import RingWriter

from keepstep.diagnosis.wavefront import diagnose_hang
from keepstep.records.evidence import GroupProgress, Position, Transfer
from keepstep.records.finding import Suspect
from keepstep.service.diagnosing import diagnose_paths

FROM_0_TO_1 = ((Suspect(source=0), Suspect(destination=1), Suspect(link=(0, 1))),)


def pair(*positions, name="tp", ranks=(0, 1), **rest):
    return GroupProgress(group=name, ranks=ranks, positions=positions, **rest)


def at(rank, queued, finished, since=None):
    return Position(rank=rank, queued=queued, finished=finished, waiting_since=since)


WORLD = GroupProgress(group="w", ranks=(0, 1, 2), positions=(at(0, 9, 8, 5.0), at(2, 9, 8, 5.0), at(1, 8, 8)))


@pytest.mark.parametrize("goes_on", [at(0, 5, 5), at(0, 6, 5, 3.0)])
def test_what_a_peer_sent_did_not_arrive(goes_on):
    """Rank 0 has finished collective 5 and rank 1 waits in it: sender, link or receiver, whatever rank 0 does next."""
    (finding,) = diagnose_hang([pair(goes_on, at(1, 5, 4, 2.0)), WORLD])
    assert (finding.kind, finding.suspects, finding.victims) == ("communication_hang", FROM_0_TO_1, (2,))
    assert finding.layer == "undetermined"


def test_a_peer_that_finished_later_ones_was_reached_by_them():
    (finding,) = diagnose_hang([pair(at(0, 9, 8, 3.0), at(1, 9, 5, 2.0))])
    assert (finding.kind, finding.layer) == ("noncommunication_hang", "hardware_gpu")
    assert finding.suspects == ((Suspect(rank=1),),)


def test_two_who_spoke_of_a_group_whose_members_are_unknown():
    groups = [pair(at(0, 6, 5, 3.0), at(1, 5, 4, 2.0), members_known=False)]
    (finding,) = diagnose_hang(groups)
    assert finding.kind == "noncommunication_hang"


@pytest.mark.parametrize("second", [(1, 0), (1, 2)])
def test_a_message_that_was_lost_looks_like_receiving_before_sending(second):
    """Each waits for a message of the next: which one was lost, or whether none was sent, cannot be told."""
    ring = [(0, 1), second] if second == (1, 0) else [(0, 1), (1, 2), (2, 0)]
    (finding,) = diagnose_hang([], [Transfer(rank=b, source=a, destination=b) for a, b in ring])
    assert finding.kind == "communication_hang"
    assert {one.link for one in finding.suspects[0]} == set(ring)
    assert finding.confidence <= 0.5
    assert any("wait for a message before they send" in line for line in finding.evidence)


def test_sends_that_nobody_receives_are_no_lost_messages():
    """Both wait in their own send: the bytes have not left."""
    (finding,) = diagnose_hang([], [Transfer(rank=a, source=a, destination=b) for a, b in ((0, 1), (1, 0))])
    assert (finding.kind, finding.layer) == ("collective_mismatch", "application")


def test_a_message_in_a_circle_with_a_collective_may_be_lost():
    transfer = Transfer(rank=1, source=0, destination=1, queued=1.0)
    (finding,) = diagnose_hang([pair(at(0, 5, 4, 1.0), at(1, 4, 4))], [transfer])
    assert finding.kind == "collective_mismatch"
    assert finding.confidence <= 0.5


def test_rings_tell_how_many_members_a_group_has(tmp_path):
    for rank, counts in enumerate(((6, 6, 5), (5, 5, 4))):
        ring = RingWriter(64, rank=rank)
        ring.put_group(0, b"tp", group_hash=9, counts=counts, size=2)
        (tmp_path / f"m{rank}.ring").write_bytes(bytes(ring.buffer))
    (finding,) = diagnose_paths([tmp_path]).findings
    assert (finding.kind, finding.suspects) == ("communication_hang", FROM_0_TO_1)


def test_logs_tell_it_where_they_tell_the_size_of_the_job(tmp_path):
    said = timeout(0, 106) + status(0, 106, 105) + timeout(1, 105) + status(1, 105, 104)
    (tmp_path / "job.log").write_text(said)
    (finding,) = diagnose_paths([tmp_path / "job.log"]).findings
    assert finding.kind == "noncommunication_hang"  # others may be members, too
    (tmp_path / "job.log").write_text("world_size=2\n" + said)
    (finding,) = diagnose_paths([tmp_path / "job.log"]).findings
    assert (finding.kind, finding.suspects) == ("communication_hang", FROM_0_TO_1)
