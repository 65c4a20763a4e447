"""The decoder of the recorder ring: order, wrap, torn slots, garbage; private state and last activity."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_writer import RingWriter

from keepstep.errors import RecordError, SchemaTooNew
from keepstep.records import ring
from keepstep.records.ring import OpSlot, PeerSlot, SlotStatus, SpanKind, SpanSlot

u32 = st.integers(0, 2**32 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
byte = st.integers(0, 255)
peer_slots = st.builds(
    PeerSlot,
    index=st.just(0),
    op_index=st.just(0),
    peer=i32,
    transport=u32,
    bytes_sent=u64,
    bytes_received=u64,
    wait_own_ns=u64,
    wait_credit_ns=u64,
    wire_ns=u64,
    wait_peer_ns=u64,
)
op_slots = st.builds(
    OpSlot,
    index=st.just(0),
    op=byte,
    algorithm=byte,
    element=byte,
    reduction=byte,
    status=st.sampled_from(SlotStatus),
    group_hash=u32,
    generation=u32,
    sequence=u64,
    step=i64,
    count=u64,
    nbytes=u64,
    queued_ns=u64,
    started_ns=u64,
    finished_ns=u64,
    rank=u32,
    root=i32,
    peers=st.lists(peer_slots, max_size=3).map(tuple),
)


def make_op(sequence: int, *, started: int = 0, finished: int = 0, peers: int = 0) -> OpSlot:
    zero = dict.fromkeys(("op", "algorithm", "element", "reduction", "count", "nbytes", "queued_ns", "root"), 0)
    slots = tuple(PeerSlot(0, 0, peer, 2, 10, 20, 1, 2, 3, 4) for peer in range(peers))
    return OpSlot(
        index=0,
        status=SlotStatus.DONE if finished else SlotStatus.RUNNING,
        group_hash=9,
        generation=5,
        sequence=sequence,
        step=12,
        started_ns=started,
        finished_ns=finished,
        rank=3,
        peers=slots,
        **zero,
    )


def numbered(written: list[OpSlot]) -> list[OpSlot]:
    """The operations with the indices a ring gives them."""
    done, index = [], 0
    for op in written:
        peers = tuple(
            msgspec.structs.replace(peer, index=index + 1 + place, op_index=index)
            for place, peer in enumerate(op.peers)
        )
        done.append(msgspec.structs.replace(op, index=index, peers=peers))
        index += 1 + len(peers)
    return done


@given(st.lists(op_slots, max_size=12))
def test_a_ring_with_room_gives_everything_back(written: list[OpSlot]) -> None:
    writer = RingWriter(64)
    for op in written:
        writer.put(op)
    decoded = ring.decode_ring(memoryview(writer.buffer))
    assert list(decoded.operations) == numbered(written)
    assert (decoded.torn, decoded.lost) == (0, 0)


@given(st.lists(op_slots, min_size=1, max_size=30), st.integers(1, 9))
def test_a_full_ring_keeps_the_newest(written: list[OpSlot], capacity: int) -> None:
    writer = RingWriter(capacity)
    for op in written:
        writer.put(op)
    decoded = ring.decode_ring(writer.buffer)
    oldest = max(0, writer.head - capacity)
    assert list(decoded.operations) == [op for op in numbered(written) if op.index >= oldest]
    assert (decoded.torn, decoded.lost) == (0, oldest)


@given(st.builds(SpanSlot, st.just(1), st.sampled_from(SpanKind), st.sampled_from(SlotStatus), i64, u64, u64, u32))
def test_spans_lie_between_operations(span: SpanSlot) -> None:
    writer = RingWriter(8)
    writer.put(make_op(0))
    writer.put_span(span)
    writer.put(make_op(1))
    decoded = ring.decode_ring(writer.buffer)
    assert decoded.spans == (span,) and [op.sequence for op in decoded.operations] == [0, 1]


def test_header_and_groups() -> None:
    writer = RingWriter(4)
    writer.put_group(0, b"world", group_hash=9, counts=(7, 6, 5))
    writer.put_group(59, b"dp", group_hash=10, counts=(1, 1, 1))
    writer.put_at(32, "<Q", 11)
    header = ring.read_header(writer.buffer)
    assert (header.capacity, header.dropped, header.heartbeat_ns, header.offset_ns) == (4, 11, 777, 10**18)
    assert (header.pid, header.rank, header.generation, header.flags, header.step) == (4242, 3, 5, 1, 12)
    assert header.member == "n1-3"
    assert [(group.name, group.size, group.group_rank) for group in header.groups] == [("world", 4, 1), ("dp", 4, 1)]
    assert (header.groups[0].queued, header.groups[0].started, header.groups[0].finished) == (7, 6, 5)
    decoded = ring.decode_ring(writer.buffer)
    assert decoded.group_name(10) == "dp" and decoded.group_name(1) == ""
    assert decoded.lost == 11


def test_a_slot_torn_by_death_is_left_out_and_the_rest_kept() -> None:
    writer = RingWriter(8)
    writer.put(make_op(0, started=1, finished=2))
    torn = writer.reserve()  # reserved, never written: the writer died
    writer.put(make_op(1, started=3))
    decoded = ring.decode_ring(writer.buffer)
    assert [op.sequence for op in decoded.operations] == [0, 1]
    assert torn == 1 and decoded.torn == 1


def test_a_slot_of_the_lap_before_is_not_taken_for_the_new_one() -> None:
    writer = RingWriter(2)
    for sequence in range(3):
        writer.put(make_op(sequence))
    writer.reserve()  # index 3, where index 1 still stands
    decoded = ring.decode_ring(writer.buffer)
    assert [op.sequence for op in decoded.operations] == [2]
    assert decoded.torn == 1


def test_nonsense_kinds_and_states_are_torn() -> None:
    writer = RingWriter(4)
    writer.put(make_op(0))
    writer.put(make_op(1))
    writer.put_at(73728 + 8, "<B", 7)
    writer.put_at(73728 + 128 + 13, "<B", 9)
    decoded = ring.decode_ring(writer.buffer)
    assert decoded.operations == () and decoded.torn == 2


@pytest.mark.parametrize(
    ("offset", "layout", "value", "kind"),
    [
        (0, "<8s", b"KSRING99", RecordError),
        (8, "<I", 2, SchemaTooNew),
        (12, "<I", 64, RecordError),
        (16, "<Q", 0, RecordError),
        (16, "<Q", 300, RecordError),
        (16, "<Q", 2**63, RecordError),
    ],
)
def test_what_is_no_ring_is_refused(offset: int, layout: str, value: object, kind: type[RecordError]) -> None:
    writer = RingWriter(4)
    writer.put_at(offset, layout, value)
    for read in (ring.read_header, ring.decode_ring, ring.last_activity):
        with pytest.raises(kind):
            read(writer.buffer)


@given(st.binary(max_size=600), st.integers(0, 74_500))
def test_garbage_never_does_more_than_be_refused(data: bytes, offset: int) -> None:
    writer = RingWriter(8)
    writer.put(make_op(0, started=1, finished=2, peers=2))
    end = min(len(writer.buffer), offset + len(data))
    writer.buffer[offset:end] = data[: end - offset]
    try:
        decoded = ring.decode_ring(writer.buffer)
    except RecordError:
        return
    assert len(decoded.operations) <= 8
    assert len(ring.read_private(writer.buffer)) <= 3


def test_a_short_buffer_is_refused() -> None:
    with pytest.raises(RecordError, match="too short"):
        ring.read_header(b"KSRING01")
    assert ring.read_private(b"short") == {}


def test_last_activity_is_in_wall_time() -> None:
    writer = RingWriter(16, offset_ns=1_700_000_000 * 10**9)
    assert ring.last_activity(writer.buffer) == ring.Activity(0.0, 0.0)
    writer.put(make_op(0, started=1 * 10**9, finished=2 * 10**9, peers=2))
    writer.put(make_op(1, started=3 * 10**9))
    assert ring.last_activity(writer.buffer) == ring.Activity(1_700_000_003.0, 1_700_000_002.0)
    assert ring.last_activity(writer.buffer, 1) == ring.Activity(1_700_000_003.0, 0.0)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_private_state_keeps_the_last_three_versions(states: list[bytes]) -> None:
    writer = RingWriter(1)
    for version, data in enumerate(states):
        ring.write_private(writer.buffer, version, data=data)
    newest = len(states) - 1
    assert ring.read_private(writer.buffer) == {v: states[v] for v in (newest - 2, newest - 1, newest) if v >= 0}


def test_private_state_fills_its_place_exactly_and_no_more() -> None:
    writer = RingWriter(1)
    writer.buffer[73728 : 73728 + 128] = b"\xaa" * 128
    full = b"z" * ring.MAX_PRIVATE_BYTES
    for version in (7, 8, 9):
        ring.write_private(writer.buffer, version, data=full)
    assert ring.read_private(writer.buffer) == {7: full, 8: full, 9: full}
    assert writer.buffer[73728 : 73728 + 128] == b"\xaa" * 128
    with pytest.raises(RecordError, match="at most"):
        ring.write_private(writer.buffer, 10, data=full + b"z")


def test_a_ring_of_a_keepstep_that_kept_two_versions_is_read() -> None:
    """G-18"""
    writer = RingWriter(4)
    for version, data in ((6, b"six"), (7, b"seven")):
        ring.write_private(writer.buffer, version, data=data)
    old = writer.buffer[: 73728 + 4 * 128]
    assert ring.read_private(old) == {6: b"six", 7: b"seven"}
    assert ring.read_header(old).capacity == 4


def test_private_state_in_mid_write_or_damaged_is_left_out() -> None:
    writer = RingWriter(1)
    ring.write_private(writer.buffer, 3, data=b"three")
    ring.write_private(writer.buffer, 4, data=b"four")
    (lock,) = struct.unpack_from("<Q", writer.buffer, 8192)
    writer.put_at(8192, "<Q", lock + 1)  # died while writing version 6
    assert ring.read_private(writer.buffer) == {4: b"four"}
    ring.write_private(writer.buffer, 6, data=b"six")  # the next writer takes the odd lock over
    assert ring.read_private(writer.buffer) == {4: b"four", 6: b"six"}
    writer.buffer[8192 + 32768 + 24] ^= 1
    assert ring.read_private(writer.buffer) == {6: b"six"}


def test_layout_constants_are_the_writers() -> None:
    assert (ring.SLOTS_OFFSET, ring.SLOT_BYTES, ring.GROUP_COUNT, ring.DEFAULT_CAPACITY) == (73728, 128, 60, 16384)
    assert ring.ring_bytes(4) == len(RingWriter(4).buffer)
