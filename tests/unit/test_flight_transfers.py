"""Flight Recorder dumps in which one end of a transfer waits: whether the other end has finished it, or never came."""

from __future__ import annotations

import pytest
from dump_files import dump, entry, write
from reading_all import findings_of, suspects_of

PAIR = range(2)


def transfers(rank, finished, waiting=0, *, forgotten=0):
    """The dump of one end of the transfers 0 -> 1; a ring that has forgotten some begins with a later record."""
    op = "nccl:send 0->1" if rank == 0 else "nccl:recv 1<-0"
    every = ["completed"] * finished + ["started"] * waiting
    entries = [entry(n, seq=n + 1, op=op, p2p=True, state=state) for n, state in enumerate(every)]
    return dump(entries[forgotten:], PAIR)


def only(tmp_path, send, receive):
    (finding,) = findings_of(write(tmp_path / "dumps", {0: send, 1: receive}))
    return finding, suspects_of([finding])


def test_what_the_sender_has_finished_did_not_arrive(tmp_path):
    finding, suspects = only(tmp_path, transfers(0, 5), transfers(1, 4, 1))
    assert finding.kind == "communication_hang"
    assert suspects == [[[{"source": 0}, {"destination": 1}, {"link": (0, 1)}]]]
    assert any("rank 0 has finished it" in line for line in finding.evidence)


def test_the_sender_of_the_next_one_did_not_come(tmp_path):
    finding, suspects = only(tmp_path, transfers(0, 4), transfers(1, 4, 1))
    assert (finding.kind, suspects) == ("noncommunication_hang", [[[{"rank": 0}]]])
    assert finding.confidence > 0.8


def test_a_sender_that_does_not_finish_what_was_received(tmp_path):
    finding, suspects = only(tmp_path, transfers(0, 4, 1), transfers(1, 5))
    assert (finding.kind, suspects) == ("communication_hang", [[[{"rank": 0}]]])


@pytest.mark.parametrize(("send", "receive"), [(3, 0), (0, 3), (3, 3)])
def test_where_a_ring_has_forgotten_the_first_ones_it_is_said(send, receive, tmp_path):
    finding, suspects = only(tmp_path, transfers(0, 5, forgotten=send), transfers(1, 4, 1, forgotten=receive))
    assert (finding.kind, suspects) == ("noncommunication_hang", [[[{"rank": 0}]]])
    assert finding.confidence < 0.8
    assert any("do not go back to the first" in line for line in finding.evidence)


def test_a_rank_that_waits_for_what_is_lost_is_no_origin(tmp_path):
    """The message 0 -> 1 is lost; rank 0 has gone on and waits for the answer."""
    back = [entry(n, seq=n + 1, op="nccl:recv 0<-1", p2p=True, state="completed") for n in (5, 6)]
    first = transfers(0, 5)
    first["entries"] += [*back[:1], entry(7, seq=8, op="nccl:recv 0<-1", p2p=True, state="started")]
    second = transfers(1, 4)
    second["entries"] += [
        entry(5, seq=6, op="nccl:send 1->0", p2p=True, state="completed"),
        entry(6, seq=7, op="nccl:recv 1<-0", p2p=True, state="started"),
    ]
    finding, suspects = only(tmp_path, first, second)
    assert finding.kind == "communication_hang"
    assert suspects == [[[{"source": 0}, {"destination": 1}, {"link": (0, 1)}]]]


def test_a_rank_whose_transfers_are_all_finished_has_reported(tmp_path):
    finding, _ = only(tmp_path, transfers(0, 5), transfers(1, 5))
    assert finding.kind == "healthy"
