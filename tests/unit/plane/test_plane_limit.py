"""Drilled links: a slow wire delivers the same bytes later and books the time as wire; a cut one delivers nothing."""

from __future__ import annotations

import numpy as np
import pytest
from plane_rig import KINDS, Group, all_reduce, span

from keepstep.errors import UsageError
from keepstep.records.ring import decode_ring
from keepstep.training.plane import Call, Element, Lane, Op, Status
from keepstep.training.recorder import Recorder


@pytest.fixture(params=["shm", "tcp", "mixed"])
def group(request):
    made = Group(4, KINDS[request.param])
    yield made
    made.close()


def arrays(count: int) -> list[np.ndarray]:
    """What each of four members contributes: whole numbers, so that every order of adding gives the same."""
    random = np.random.default_rng(count)
    return [random.integers(-99, 99, count).astype(np.float32) for _ in range(4)]


@pytest.mark.parametrize("count", [1, 3, 5000, 30_000, 300_001])
def test_a_slow_wire_changes_no_result(group, count):
    group.domains[1].limit(102, 2e7)
    group.domains[3].limit(100, 1e8)
    values = arrays(count)
    expected = sum(values)
    assert group.run([all_reduce(value) for value in values]) == [Status.DONE] * 4
    assert all(np.array_equal(value, expected) for value in values)


def test_the_wire_takes_its_time_and_is_recorded_only_there():
    group = Group(2, KINDS["shm"])
    recorders = [Recorder.private_memory(1024) for _ in range(2)]
    for domain, recorder in zip(group.domains, recorders, strict=True):
        domain.record_into(recorder.address, recorder.size)
    rate = 4e6
    group.domains[0].limit(101, rate)
    values = [np.ones(50_000, np.float32) for _ in range(2)]
    assert group.run([all_reduce(value) for value in values]) == [Status.DONE] * 2
    group.close()
    (there,), (back,) = [
        [op.peers[0] for op in decode_ring(bytes(recorder._memory)).operations] for recorder in recorders
    ]
    least_ns = there.bytes_sent / rate * 1e9
    assert there.bytes_sent == back.bytes_sent > 0
    assert there.wire_ns >= least_ns > 2 * back.wire_ns
    assert back.wait_peer_ns > least_ns / 2


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_in_a_ring_only_the_slow_link_is_slow_on_the_wire(kind):
    """The pattern by which a slow link is told from a late rank: all others wait, nobody else is long on the wire."""
    group = Group(4, KINDS[kind])
    recorders = [Recorder.private_memory(1024) for _ in range(4)]
    for domain, recorder in zip(group.domains, recorders, strict=True):
        domain.record_into(recorder.address, recorder.size)
    rate = 3e6
    group.domains[1].limit(102, rate)
    values = [np.ones(60_000, np.float32) for _ in range(4)]
    assert group.run([all_reduce(value) for value in values]) == [Status.DONE] * 4
    group.close()
    wire, waits = {}, {}
    for rank, recorder in enumerate(recorders):
        (op,) = decode_ring(bytes(recorder._memory)).operations
        for peer in op.peers:
            wire[rank, peer.peer - 100] = peer.wire_ns
            waits[rank, peer.peer - 100] = peer.wait_peer_ns
    slow = wire.pop((1, 2))
    least_ns = 60_000 * 4 * 2 * 3 / 4 / rate * 1e9
    assert slow >= least_ns > 4 * max(wire.values())
    assert max(waits, key=lambda pair: waits[pair]) == (2, 1)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_nothing_passes_a_cut_link_until_the_drill_ends(kind):
    group = Group(2, KINDS[kind])
    group.domains[0].limit(101, 0.0)
    values = [np.full(10, rank, np.float32) for rank in range(2)]
    tickets = group.submit([all_reduce(value) for value in values])
    assert group.wait(tickets, timeout_s=0.05)[1] is Status.PENDING
    group.domains[0].limit(101, None)
    assert group.wait(tickets) == [Status.DONE] * 2
    assert values[1].tolist() == [1.0] * 10
    group.close()


def test_the_other_direction_of_a_cut_link_is_whole():
    group = Group(2, KINDS["shm"], lane=Lane.P2P)
    group.domains[0].limit(101, 0.0)
    sent, received = np.arange(9.0), np.zeros(9)
    give = group.planes[1].submit(Call(Op.SEND, Element.FLOAT64, peer=0, inputs=[span(sent)], timeout_s=30))
    take = group.planes[0].submit(Call(Op.RECV, Element.FLOAT64, peer=1, outputs=[span(received)], timeout_s=30))
    assert group.planes[0].wait(take, 30) is Status.DONE
    assert group.planes[1].wait(give, 30) is Status.DONE
    assert np.array_equal(sent, received)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_message_under_way_on_a_cut_link_shows_where_it_hangs(kind):
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    recorders = [Recorder.private_memory(1024) for _ in range(2)]
    for domain, recorder in zip(group.domains, recorders, strict=True):
        domain.record_into(recorder.address, recorder.size)
    group.domains[0].limit(101, 0.0)
    sent, received = np.arange(9.0), np.zeros(9)
    give = group.planes[0].submit(Call(Op.SEND, Element.FLOAT64, peer=1, inputs=[span(sent)]))
    take = group.planes[1].submit(Call(Op.RECV, Element.FLOAT64, peer=0, outputs=[span(received)]))
    assert group.planes[0].wait(give, 1.3) is Status.PENDING
    (there,), (back,) = [decode_ring(bytes(recorder._memory)).operations for recorder in recorders]
    (sending,), (receiving,) = there.peers, back.peers
    assert (sending.peer, sending.bytes_sent) == (101, 0) and sending.wire_ns > 4e8
    assert receiving.peer == 100 and receiving.wait_peer_ns > 4e8
    group.domains[0].limit(101, None)
    assert group.planes[1].wait(take, 30) is Status.DONE and np.array_equal(sent, received)
    group.close()


def test_a_cut_link_can_be_aborted_and_carries_the_next_generation():
    group = Group(2, KINDS["shm"], protected=True)
    group.domains[0].limit(101, 0.0)
    cut = [np.zeros(100_000, np.float32) for _ in range(2)]
    tickets = group.submit([all_reduce(value) for value in cut])
    assert group.wait(tickets, timeout_s=0.05)[1] is Status.PENDING
    for domain in group.domains:
        domain.poison()
    assert group.wait(tickets) == [Status.ABORTED] * 2
    group.domains[0].limit(101, None)
    for domain in group.domains:
        domain.install(1)
    values = [np.ones(100_000, np.float32) for _ in range(2)]
    assert group.run([all_reduce(value) for value in values]) == [Status.DONE] * 2
    assert values[0][-1] == 2.0
    group.close()


def test_bytes_are_counted_and_there_are_not_endless_drills():
    group = Group(2, KINDS["shm"])
    domain = group.domains[0]
    domain.limit(101, -1.0)
    values = [np.zeros(100, np.float32) for _ in range(2)]
    assert group.run([all_reduce(value) for value in values]) == [Status.DONE] * 2
    assert domain.limited_bytes(101) >= 400
    assert domain.limited_bytes(7) == 0
    domain.limit(101, None)
    assert domain.limited_bytes(101) == 0
    for rank in range(64):
        domain.limit(1000 + rank, 1.0)
    with pytest.raises(UsageError, match="no room"):
        domain.limit(2000, 1.0)
    domain.limit(1007, None)
    domain.limit(2000, 1.0)
    group.close()
