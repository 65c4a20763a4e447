"""Point to point: tags, any source, many messages at once, messages that come before their receive."""

from __future__ import annotations

import random

import numpy as np
import pytest
from plane_rig import KINDS, Group, span

from keepstep.errors import UsageError
from keepstep.training.plane import Call, Lane, Op, Plane, Status

LIMIT_S = 30.0


def send(plane: Plane, peer: int, data: np.ndarray, *, tag: int = 0, timeout_s: float | None = None) -> int:
    return plane.submit(Call(Op.SEND, peer=peer, tag=tag, inputs=[span(data)], timeout_s=timeout_s))


def receive(plane: Plane, peer: int, data: np.ndarray, *, tag: int = 0, timeout_s: float | None = None) -> int:
    return plane.submit(Call(Op.RECV, peer=peer, tag=tag, outputs=[span(data)], timeout_s=timeout_s))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("seed", range(4))
def test_many_messages_both_ways(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    group = Group(3, KINDS[kind], lane=Lane.P2P)
    sends, receives, want = [], [], []
    for i in range(80):
        a, b = rng.sample(range(3), 2)
        count = rng.choice([0, 1, 15, 4_097, 100_001, 2_500_000 if i % 20 == 0 else 7])
        data = np.random.default_rng(i).integers(0, 255, count).astype(np.uint8)
        tag = rng.randrange(4)
        sends.append((a, b, data, tag))
        receives.append((b, a, np.zeros(count, np.uint8), tag))
        want.append(data)
    jobs = ["send", "recv"] * 80
    rng.shuffle(jobs)
    # Messages with one tag between two ranks keep their order, so each side must submit those in order.
    sends_in_order = iter(range(80))
    receives_in_order = iter(range(80))
    tickets = []
    for what in jobs:
        if what == "send":
            a, b, data, tag = sends[next(sends_in_order)]
            tickets.append((a, send(group.planes[a], b, data, tag=tag)))
        else:
            b, a, data, tag = receives[next(receives_in_order)]
            tickets.append((b, receive(group.planes[b], a, data, tag=tag)))
    for rank, ticket in tickets:
        assert group.planes[rank].wait(ticket, LIMIT_S) is Status.DONE
        group.planes[rank].release(ticket)
    for (_, _, got, _), data in zip(receives, want, strict=True):
        assert np.array_equal(got, data)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_any_source_names_the_sender(kind: str) -> None:
    group = Group(4, KINDS[kind], lane=Lane.P2P)
    outs = [np.zeros(60_000, np.uint16) for _ in range(3)]
    tickets = [receive(group.planes[0], -1, out, tag=5) for out in outs]
    data = {r: np.full(60_000, r, np.uint16) for r in (1, 2, 3)}
    sent = [(r, send(group.planes[r], 0, data[r], tag=5)) for r in (3, 1, 2)]
    for rank, ticket in sent:
        assert group.planes[rank].wait(ticket, LIMIT_S) is Status.DONE
    sources = []
    for ticket, out in zip(tickets, outs, strict=True):
        assert group.planes[0].wait(ticket, LIMIT_S) is Status.DONE
        sources.append(group.planes[0].source(ticket))
        assert (out == sources[-1]).all()
    assert sorted(sources) == [1, 2, 3]
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_messages_ahead_of_their_receive_wait_in_order(kind: str) -> None:
    """The receive of the last message makes all earlier ones wait in the stash."""
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    data = [np.full(900_001, i, np.uint8) for i in range(6)]
    sends = [send(group.planes[0], 1, d, tag=i) for i, d in enumerate(data)]
    for i in (5, 3, 4, 0, 2, 1):
        out = np.zeros(900_001, np.uint8)
        ticket = receive(group.planes[1], 0 if i % 2 else -1, out, tag=i)
        assert group.planes[1].wait(ticket, LIMIT_S) is Status.DONE
        assert (out == i).all()
    assert all(group.planes[0].wait(t, LIMIT_S) is Status.DONE for t in sends)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_sizes_that_differ_fail_the_receive_only(kind: str) -> None:
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    data, small, right = np.arange(100_000, dtype=np.uint8), np.zeros(8, np.uint8), np.zeros(100_000, np.uint8)
    first, second = receive(group.planes[1], 0, small), receive(group.planes[1], 0, right)
    sends = [send(group.planes[0], 1, data) for _ in range(2)]
    assert group.planes[1].wait(first, LIMIT_S) is Status.FAILED
    failure = group.planes[1].failure(first)
    assert failure.peer == 0
    assert "100000 bytes" in failure.what
    assert "8 bytes" in failure.what
    assert group.planes[1].wait(second, LIMIT_S) is Status.DONE
    assert np.array_equal(right, data)
    assert all(group.planes[0].wait(t, LIMIT_S) is Status.DONE for t in sends)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_receive_that_gives_up_and_a_send_that_gives_up(kind: str) -> None:
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    out = np.zeros(10, np.uint8)
    ticket = receive(group.planes[1], 0, out, timeout_s=0.02)
    assert group.planes[1].wait(ticket, LIMIT_S) is Status.FAILED
    assert group.planes[1].failure(ticket).peer == 0
    assert "rank 0 has not delivered" in group.planes[1].failure(ticket).what
    huge = np.ones(30_000_000, np.uint8)
    ticket = send(group.planes[0], 1, huge, timeout_s=0.05)
    assert group.planes[0].wait(ticket, LIMIT_S) is Status.FAILED
    assert "rank 1 has not taken" in group.planes[0].failure(ticket).what
    good = np.full(10, 7, np.uint8)
    sent = send(group.planes[0], 1, good)
    wide = np.zeros(30_000_000, np.uint8)
    cut = receive(group.planes[1], 0, wide)
    got = receive(group.planes[1], 0, out)
    assert group.planes[1].wait(cut, LIMIT_S) is Status.FAILED
    assert group.planes[1].wait(got, LIMIT_S) is Status.DONE
    assert (out == 7).all()
    assert group.planes[0].wait(sent, LIMIT_S) is Status.DONE
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_receiver_that_already_sleeps_notices_a_send_that_gave_up(kind: str) -> None:
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    huge, wide, out = np.ones(9_000_000, np.uint8), np.zeros(9_000_000, np.uint8), np.zeros(10, np.uint8)
    ticket = send(group.planes[0], 1, huge, timeout_s=0.05)
    assert group.planes[0].wait(ticket, LIMIT_S) is Status.FAILED
    cut = receive(group.planes[1], 0, wide)
    got = receive(group.planes[1], 0, out)
    assert group.planes[1].wait(cut, 0.1) is Status.PENDING
    good = np.full(10, 7, np.uint8)
    sent = send(group.planes[0], 1, good)
    assert group.planes[1].wait(cut, LIMIT_S) is Status.FAILED
    assert group.planes[1].wait(got, LIMIT_S) is Status.DONE
    assert group.planes[0].wait(sent, LIMIT_S) is Status.DONE
    group.close()


def test_calls_that_make_no_sense() -> None:
    group = Group(2, KINDS["shm"], lane=Lane.P2P)
    data = np.zeros(4, np.uint8)
    plane = group.planes[0]
    for call in (
        Call(Op.SEND, peer=0, inputs=[span(data)]),
        Call(Op.SEND, peer=2, inputs=[span(data)]),
        Call(Op.SEND, peer=-1, inputs=[span(data)]),
        Call(Op.RECV, peer=1, inputs=[span(data)]),
        Call(Op.BARRIER),
    ):
        with pytest.raises(UsageError):
            plane.submit(call)
    group.close()


def test_finished_tickets_come_out_of_the_queue_once() -> None:
    group = Group(2, KINDS["shm"], lane=Lane.P2P)
    data, out = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    a = group.planes[0].submit(Call(Op.SEND, peer=1, inputs=[span(data)], want_future=True))
    b = group.planes[1].submit(Call(Op.RECV, peer=0, outputs=[span(out)], want_future=True))
    assert group.planes[0].next_done(LIMIT_S) == a
    assert group.planes[1].next_done(LIMIT_S) == b
    assert group.planes[1].next_done(0.0) is None
    group.close()
    assert group.planes[1].next_done(None) is None
