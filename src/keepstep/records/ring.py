"""The recorder's ring: the layout of the shared memory a member writes, and its decoder.

The writer is another process, alive, frozen or dead in mid-write, so nothing here trusts the bytes: a slot counts
only if its index is the one its place must hold, and private state only if its checksum is right. All times are
nanoseconds of CLOCK_MONOTONIC of the member's host; wall = monotonic + `offset_ns`. Little endian throughout.

Header (8192 bytes), private state (2 x 32768 bytes), `capacity` slots of 128 bytes, private state once more.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from mmap import mmap

import msgspec

from keepstep.errors import RecordError, SchemaTooNew
from keepstep.records.ring_layout import (
    COMMON,
    DEFAULT_CAPACITY,
    GROUP,
    GROUP_BYTES,
    GROUP_COUNT,
    GROUPS_OFFSET,
    HEADER,
    HEADER_BYTES,
    LAYOUT_VERSION,
    MAGIC,
    MAX_PRIVATE_BYTES,
    OP,
    PEER,
    PRIVATE,
    PRIVATE_BYTES,
    SLOT_BODY,
    SLOT_BYTES,
    SLOTS_OFFSET,
    SPAN,
    private_places,
    ring_bytes,
)

__all__ = [
    "DEFAULT_CAPACITY",
    "GROUP_COUNT",
    "HEADER_BYTES",
    "MAX_PRIVATE_BYTES",
    "PRIVATE_BYTES",
    "SLOTS_OFFSET",
    "SLOT_BYTES",
    "Activity",
    "GroupState",
    "OpSlot",
    "PeerSlot",
    "Ring",
    "RingHeader",
    "SlotStatus",
    "SpanKind",
    "SpanSlot",
    "decode_ring",
    "last_activity",
    "read_header",
    "read_private",
    "ring_bytes",
    "write_private",
]

_MAX_CAPACITY = 1 << 24

_Buffer = bytes | bytearray | memoryview


class SlotStatus(IntEnum):
    """How far an operation got."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    ABORTED = 3
    FAILED = 4


class SpanKind(IntEnum):
    """What a training loop does that is no collective. STEP: a step from its hand-out to its end; DATA: waiting for
    the loader's next batch; CHECKPOINT: the part of a save that the loop waits for; SETUP: from the welcome to the
    first step. What lies between two STEP spans is the user's own (validation, files)."""

    STEP = 1
    DATA = 2
    CHECKPOINT = 3
    SETUP = 4


class GroupState(msgspec.Struct, frozen=True):
    """One process group of the member: how many collectives were queued, started and finished in `generation`."""

    name: str
    hash: int
    lane: int
    size: int
    group_rank: int
    queued: int
    started: int
    finished: int
    generation: int


class RingHeader(msgspec.Struct, frozen=True):
    """Who wrote the ring, how far it is, and the member's groups. `offset_ns` is wall minus monotonic."""

    capacity: int
    head: int
    dropped: int
    heartbeat_ns: int
    offset_ns: int
    pid: int
    rank: int
    generation: int
    flags: int
    step: int
    member: str
    groups: tuple[GroupState, ...]


class PeerSlot(msgspec.Struct, frozen=True):
    """Where the bytes of operation `op_index` went for one peer; waits in ns, sizes in bytes.

    `transport` is 1 for TCP and 2 for shared memory.
    """

    index: int
    op_index: int
    peer: int
    transport: int
    bytes_sent: int
    bytes_received: int
    wait_own_ns: int
    wait_credit_ns: int
    wire_ns: int
    wait_peer_ns: int


class OpSlot(msgspec.Struct, frozen=True):
    """One collective or point-to-point operation; times in ns, 0 where not yet reached. `peers` in order of index."""

    index: int
    op: int
    algorithm: int
    element: int
    reduction: int
    status: SlotStatus
    group_hash: int
    generation: int
    sequence: int
    step: int
    count: int
    nbytes: int
    queued_ns: int
    started_ns: int
    finished_ns: int
    rank: int
    root: int
    peers: tuple[PeerSlot, ...] = ()


class SpanSlot(msgspec.Struct, frozen=True):
    """A stretch of time of the training loop, in ns; `ended_ns` is 0 while it lasts. `what` is a `SpanKind`."""

    index: int
    what: int
    status: SlotStatus
    step: int
    began_ns: int
    ended_ns: int
    generation: int


class Ring(msgspec.Struct, frozen=True):
    """A decoded ring: operations and spans in order of index. `torn` counts places that held no whole slot, `lost` the
    slots overwritten by newer ones or dropped by the writer."""

    header: RingHeader
    operations: tuple[OpSlot, ...]
    torn: int
    lost: int
    spans: tuple[SpanSlot, ...] = ()

    def group_name(self, group_hash: int) -> str:
        """The name of the group with that hash; "" if the header does not list it."""
        return next((group.name for group in self.header.groups if group.hash == group_hash), "")


class Activity(msgspec.Struct, frozen=True):
    """When the member last did something: wall clock in s since 1970, 0.0 where never."""

    started: float
    finished: float


def read_header(buffer: _Buffer) -> RingHeader:
    """The header of a ring. Raises RecordError if it is none, SchemaTooNew if its layout is newer."""
    if len(buffer) < SLOTS_OFFSET:
        raise RecordError(f"a recorder ring of {len(buffer)} bytes is too short")
    fields = HEADER.unpack_from(buffer)
    magic, version, slot_bytes, capacity = fields[:4]
    if magic != MAGIC:
        raise RecordError("not a recorder ring: its first bytes are wrong")
    if version > LAYOUT_VERSION:
        raise SchemaTooNew(
            f"recorder ring of layout {version}, this keepstep reads up to {LAYOUT_VERSION}",
            remedy="read it with the keepstep version that wrote it",
        )
    if slot_bytes != SLOT_BYTES or not 0 < capacity <= _MAX_CAPACITY or len(buffer) < _slots_end(capacity):
        raise RecordError(f"recorder ring with {capacity} slots of {slot_bytes} bytes in {len(buffer)} bytes")
    return RingHeader(*(*fields[3:-1], _text(fields[-1]), tuple(_groups(buffer))))


def decode_ring(buffer: _Buffer, *, newest: int | None = None) -> Ring:
    """Everything whole in a ring (in its `newest` slots only, if given), oldest first.

    Raises RecordError and SchemaTooNew as `read_header` does.
    """
    header = read_header(buffer)
    first = max(0, header.head - min(header.capacity, header.capacity if newest is None else newest))
    operations: dict[int, OpSlot] = {}
    peers: dict[int, list[PeerSlot]] = {}
    spans: list[SpanSlot] = []
    torn = 0
    for index in range(first, header.head):
        slot = _slot(buffer, index, capacity=header.capacity)
        if isinstance(slot, OpSlot):
            operations[index] = slot
        elif isinstance(slot, PeerSlot):
            peers.setdefault(slot.op_index, []).append(slot)
        elif isinstance(slot, SpanSlot):
            spans.append(slot)
        else:
            torn += 1
    whole = (
        msgspec.structs.replace(slot, peers=tuple(peers[index])) if index in peers else slot
        for index, slot in operations.items()
    )
    return Ring(header, tuple(whole), torn, first + header.dropped, tuple(spans))


def last_activity(buffer: _Buffer, newest: int = 1024) -> Activity:
    """When an operation was last started and last finished, by the `newest` slots. Raises as `read_header` does.

    A member that died left its pattern after both, and no later than its peers' next collective with it.
    """
    header = read_header(buffer)
    started = finished = 0
    for index in range(max(0, header.head - min(header.capacity, newest)), header.head):
        slot = _slot(buffer, index, capacity=header.capacity)
        if isinstance(slot, OpSlot):
            started = max(started, slot.started_ns)
            finished = max(finished, slot.finished_ns)
    return Activity(_wall(started, header.offset_ns), _wall(finished, header.offset_ns))


def read_private(buffer: _Buffer) -> dict[int, bytes]:
    """The member's private state by version: at most three. One in mid-write or with a wrong checksum is left out."""
    found: dict[int, bytes] = {}
    for offset in private_places(_capacity(buffer)):
        if len(buffer) < offset + PRIVATE_BYTES:
            break
        before, version, length, checksum = PRIVATE.unpack_from(buffer, offset)
        if before == 0 or before % 2 or length > MAX_PRIVATE_BYTES:
            continue
        start = offset + PRIVATE.size
        data = bytes(buffer[start : start + length])
        after = PRIVATE.unpack_from(buffer, offset)
        if after == (before, version, length, checksum) and zlib.crc32(data) == checksum:
            found[version] = data
    return found


def write_private(buffer: bytearray | memoryview | mmap, version: int, *, data: bytes) -> None:
    """Publish private state of `version` (>= 0), in the place of version - 3. Raises RecordError if it is too long.

    Three are kept: a member that applied an update no other one saw agreed may be in the next step already, while the
    others do the earlier one again.
    """
    if len(data) > MAX_PRIVATE_BYTES:
        raise RecordError(
            f"private state of {len(data)} bytes, at most {MAX_PRIVATE_BYTES} fit",
            remedy="keep RNG and data position small, or let the data loader keep less state",
        )
    offset = private_places(_capacity(buffer))[version % 3]
    (lock,) = struct.unpack_from("<Q", buffer, offset)
    writing = lock + 1 if lock % 2 == 0 else lock  # odd already: a writer died here
    struct.pack_into("<Q", buffer, offset, writing)
    struct.pack_into("<qII", buffer, offset + 8, version, len(data), zlib.crc32(data))
    start = offset + PRIVATE.size
    buffer[start : start + len(data)] = data
    struct.pack_into("<Q", buffer, offset, writing + 1)


def _capacity(buffer: _Buffer | mmap) -> int:
    """Slots by the header, at most as many as there is room for."""
    (capacity,) = struct.unpack_from("<Q", buffer, 16) if len(buffer) >= 24 else (0,)
    return int(min(capacity, max(len(buffer) - SLOTS_OFFSET, 0) // SLOT_BYTES))


def _slots_end(capacity: int) -> int:
    return SLOTS_OFFSET + capacity * SLOT_BYTES


def _groups(buffer: _Buffer) -> Iterator[GroupState]:
    for number in range(GROUP_COUNT):
        name, *numbers = GROUP.unpack_from(buffer, GROUPS_OFFSET + number * GROUP_BYTES)
        if name[0]:
            yield GroupState(_text(name), *numbers)


def _slot(buffer: _Buffer, index: int, *, capacity: int) -> OpSlot | PeerSlot | SpanSlot | None:
    """The slot `index`; None if its place holds something else (empty, older, in mid-write, nonsense)."""
    offset = SLOTS_OFFSET + (index % capacity) * SLOT_BYTES
    raw = bytes(buffer[offset : offset + SLOT_BYTES])
    mark, kind, op, algorithm, element, reduction, status, _npeers = COMMON.unpack_from(raw)
    if mark != index + 1 or bytes(buffer[offset : offset + 8]) != raw[:8]:
        return None
    if kind == 1 and status <= SlotStatus.FAILED:
        return OpSlot(index, op, algorithm, element, reduction, SlotStatus(status), *OP.unpack_from(raw, SLOT_BODY))
    if kind == 2:
        return PeerSlot(index, *PEER.unpack_from(raw, SLOT_BODY))
    if kind == 3 and status <= SlotStatus.FAILED:
        return SpanSlot(index, op, SlotStatus(status), *SPAN.unpack_from(raw, SLOT_BODY))
    return None


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _wall(mono_ns: int, offset_ns: int) -> float:
    return (mono_ns + offset_ns) / 1e9 if mono_ns else 0.0
