"""What the data plane writes into the recorder ring, read back with `records.ring`."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct

import numpy as np
import pytest
from plane_rig import KINDS, Group, all_reduce, span

from keepstep.records.ring import OpSlot, PeerSlot, SlotStatus, SpanKind, decode_ring, ring_bytes
from keepstep.training.plane import Call, Domain, Element, Lane, Op, Plane, Reduction, Status

LIMIT_S = 20.0
CAPACITY = 512


class Memory:
    """A recorder ring in shared memory with its identity written, as training/recorder.py makes it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.size = ring_bytes(capacity)
        self.map = mmap.mmap(-1, self.size)
        self.map[0:24] = struct.pack("<8sIIQ", b"KSRING01", 1, 128, capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def record(self, domain: Domain) -> None:
        domain.record_into(self.address, self.size)

    def operations(self) -> tuple[OpSlot, ...]:
        return decode_ring(bytes(self.map)).operations


def recorded(group: Group, capacity: int = CAPACITY) -> list[Memory]:
    memories = [Memory(capacity) for _ in group.domains]
    for memory, domain in zip(memories, group.domains, strict=True):
        memory.record(domain)
    return memories


def by_peer(slot: OpSlot) -> dict[int, PeerSlot]:
    return {peer.peer: peer for peer in slot.peers}


def test_fields_of_a_collective() -> None:
    group = Group(3, KINDS["mixed"])
    memories = recorded(group)
    group.domains[0].set_step(41)
    arrays = [np.ones(50_000, np.float16) for _ in range(3)]
    calls = [all_reduce(a, element=Element.FLOAT16, how=Reduction.MAX) for a in arrays]
    assert group.run([Call(Op.BARRIER) for _ in range(3)]) == [Status.DONE] * 3
    assert group.run(calls) == [Status.DONE] * 3
    barrier, slot = memories[0].operations()
    assert (barrier.op, barrier.sequence, barrier.nbytes) == (Op.BARRIER, 0, 0)
    assert (slot.op, slot.element, slot.reduction) == (Op.ALL_REDUCE, Element.FLOAT16, Reduction.MAX)
    assert (slot.status, slot.sequence, slot.step, slot.generation) == (SlotStatus.DONE, 1, 41, 0)
    assert (slot.count, slot.nbytes, slot.rank, slot.root) == (50_000, 100_000, 100, 0)
    assert 0 < slot.queued_ns <= slot.started_ns <= slot.finished_ns
    peers = by_peer(slot)
    assert set(peers) == {101, 102}
    assert (peers[101].transport, peers[102].transport) == (2, 1)
    moved = 2 * 100_000 * 2 // 3
    assert abs(peers[101].bytes_sent - moved) < 10
    assert abs(peers[102].bytes_received - moved) < 10
    assert peers[102].bytes_sent == peers[101].bytes_received == 0
    assert sum(p.wire_ns for p in peers.values()) <= slot.finished_ns - slot.started_ns
    group.close()


def test_group_table_counts_and_follows_generations() -> None:
    group = Group(2, KINDS["shm"])
    memories = recorded(group)
    for _ in range(3):
        group.run([Call(Op.BARRIER) for _ in range(2)])
    ticket = group.planes[0].submit(Call(Op.BARRIER))
    queued = group.planes[0].submit(Call(Op.BARRIER))
    assert group.planes[0].wait(queued, 0.05) is Status.PENDING
    header = decode_ring(bytes(memories[0].map)).header
    (entry,) = header.groups
    assert (entry.name, entry.lane, entry.size, entry.group_rank) == ("test", 0, 2, 0)
    assert (entry.queued, entry.started, entry.finished) == (5, 4, 3)
    assert decode_ring(bytes(memories[0].map)).group_name(entry.hash) == "test"
    group.domains[0].install(7)
    assert group.planes[0].wait(ticket) is Status.ABORTED
    header = decode_ring(bytes(memories[0].map)).header
    assert header.generation == 7
    (entry,) = header.groups
    assert (entry.queued, entry.started, entry.finished, entry.generation) == (0, 0, 0, 7)
    assert memories[0].operations()[-1].status is SlotStatus.ABORTED
    group.planes[0].close()
    assert decode_ring(bytes(memories[0].map)).header.groups == ()
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_waiting_is_booked_where_it_belongs(kind: str) -> None:
    """Rank 1 of a chain waits for rank 0 (wait_peer) and therefore has nothing for rank 2 (wait_own)."""
    group = Group(3, KINDS[kind])
    memories = recorded(group)
    arrays = [np.ones(100_000, np.float32) for _ in range(3)]
    calls = [Call(Op.BROADCAST, inputs=[span(arrays[0])])]
    calls += [Call(Op.BROADCAST, outputs=[span(a)]) for a in arrays[1:]]
    tickets = {r: group.planes[r].submit(calls[r]) for r in (2, 1)}
    assert group.planes[1].wait(tickets[1], 0.2) is Status.PENDING
    tickets[0] = group.planes[0].submit(calls[0])
    for rank, ticket in tickets.items():
        assert group.planes[rank].wait(ticket, LIMIT_S) is Status.DONE
    (slot,) = memories[1].operations()
    peers, whole = by_peer(slot), slot.finished_ns - slot.started_ns
    assert peers[100].wait_peer_ns > whole / 2
    assert peers[102].wait_own_ns > whole / 2
    assert peers[102].wait_credit_ns < whole / 4
    (slot,) = memories[0].operations()
    assert by_peer(slot)[101].wait_own_ns == 0
    group.close()


def test_a_call_under_way_shows_who_is_waited_for() -> None:
    group = Group(3, KINDS["tcp"])
    memories = recorded(group)
    ticket = group.planes[1].submit(Call(Op.BROADCAST, outputs=[span(np.ones(100_000, np.float32))]))
    assert group.planes[1].wait(ticket, 1.3) is Status.PENDING
    (slot,) = memories[1].operations()
    assert (slot.status, slot.finished_ns) == (SlotStatus.RUNNING, 0)
    peers = by_peer(slot)
    assert peers[100].wait_peer_ns > 5e8 and peers[102].wait_peer_ns == 0
    assert decode_ring(bytes(memories[1].map)).header.heartbeat_ns > slot.started_ns
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_full_peer_is_booked_as_credit(kind: str) -> None:
    group = Group(2, KINDS[kind], lane=Lane.P2P)
    memories = recorded(group)
    data, out = np.ones(20_000_000, np.uint8), np.zeros(20_000_000, np.uint8)
    sent = group.planes[0].submit(Call(Op.SEND, peer=1, inputs=[span(data)]))
    assert group.planes[0].wait(sent, 0.2) is Status.PENDING
    got = group.planes[1].submit(Call(Op.RECV, peer=-1, outputs=[span(out)]))
    assert group.planes[0].wait(sent, LIMIT_S) is Status.DONE
    assert group.planes[1].wait(got, LIMIT_S) is Status.DONE
    (slot,) = memories[0].operations()
    (peer,) = slot.peers
    assert slot.root == 101 and memories[1].operations()[0].root == -1
    assert (peer.peer, peer.bytes_sent) == (101, 20_000_000)
    assert peer.wait_credit_ns > peer.wait_own_ns
    assert peer.wait_credit_ns > (slot.finished_ns - slot.started_ns) / 4
    (slot,) = memories[1].operations()
    assert (slot.peers[0].peer, slot.peers[0].bytes_received) == (100, 20_000_000)
    group.close()


def test_recording_can_be_switched_and_the_ring_goes_round() -> None:
    group = Group(2, KINDS["shm"])
    memories = recorded(group, capacity=256)
    for i in range(300):
        group.domains[0].recording = i % 3 != 0
        assert group.run([Call(Op.BARRIER) for _ in range(2)]) == [Status.DONE] * 2
    ring = decode_ring(bytes(memories[0].map))
    assert ring.header.head == 2 * 200
    assert [slot.sequence for slot in ring.operations] == [i for i in range(300) if i % 3][-len(ring.operations) :]
    assert len(ring.operations) == 128
    group.close()


def test_a_span_is_seen_open_and_closed_in_place() -> None:
    memory, domain = Memory(), Domain(protected=True)
    assert domain.span_begin(SpanKind.DATA) == 0
    memory.record(domain)
    domain.set_step(7)
    outer, inner = domain.span_begin(SpanKind.STEP), domain.span_begin(SpanKind.DATA)
    domain.span_end(inner)
    step, data = decode_ring(bytes(memory.map)).spans
    assert (step.what, step.step, step.ended_ns, step.status) == (SpanKind.STEP, 7, 0, SlotStatus.RUNNING)
    assert (data.what, data.status) == (SpanKind.DATA, SlotStatus.DONE)
    assert step.began_ns <= data.began_ns <= data.ended_ns
    domain.span_end(outer)
    assert decode_ring(bytes(memory.map)).spans[0].ended_ns >= data.ended_ns
    domain.close()


def test_a_span_that_the_ring_has_passed_is_left_alone() -> None:
    memory, domain = Memory(256), Domain(protected=True)
    memory.record(domain)
    first = domain.span_begin(SpanKind.STEP)
    for _ in range(256):
        domain.span_end(domain.span_begin(SpanKind.DATA))
    before = bytes(memory.map)
    domain.span_end(first)
    assert bytes(memory.map) == before
    domain.close()


def test_no_ring_no_recording() -> None:
    domain = Domain(protected=False)
    domain.recording = True
    assert not domain.recording
    domain.close()


def test_the_call_in_flight_outlives_the_process() -> None:
    memory = Memory()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        domain = Domain(protected=True)
        memory.record(domain)
        plane = Plane(domain, 1, size=2, lane=Lane.COLLECTIVE, group="world", global_ranks=(0, 1))
        domain.set_step(12)
        array = np.ones(1000, np.float32)
        plane.wait(plane.submit(all_reduce(array)), 0.05)
        os.write(tell, b"!")
        signal.pause()
    assert os.read(ready, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ring = decode_ring(bytes(memory.map))
    (slot,) = ring.operations
    assert (slot.status, slot.step, slot.sequence, slot.nbytes) == (SlotStatus.RUNNING, 12, 0, 4000)
    assert (slot.finished_ns, slot.rank) == (0, 1)
    assert ring.header.groups[0].started == 1
    assert ring.header.groups[0].finished == 0
    os.close(ready)
    os.close(tell)
