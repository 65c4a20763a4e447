"""Where each field of the recorder's ring lies. Little endian, no padding but what is named."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

__all__ = [
    "COMMON",
    "DEFAULT_CAPACITY",
    "GROUP",
    "GROUPS_OFFSET",
    "GROUP_BYTES",
    "GROUP_COUNT",
    "HEADER",
    "HEADER_BYTES",
    "LAYOUTS",
    "LAYOUT_VERSION",
    "MAGIC",
    "MAX_PRIVATE_BYTES",
    "OP",
    "PEER",
    "PRIVATE",
    "PRIVATE_BYTES",
    "SLOTS_OFFSET",
    "SLOT_BODY",
    "SLOT_BYTES",
    "SPAN",
    "Layout",
    "private_places",
    "ring_bytes",
]

MAGIC = b"KSRING01"
LAYOUT_VERSION = 1
HEADER_BYTES = 8192
PRIVATE_BYTES = 32768
SLOTS_OFFSET = HEADER_BYTES + 2 * PRIVATE_BYTES
SLOT_BYTES = 128
SLOT_BODY = 16
GROUP_COUNT = 60
GROUPS_OFFSET = 128
GROUP_BYTES = 128
DEFAULT_CAPACITY = 16384

HEADER = struct.Struct("<8sIIQQQQqIiIIQ48s")
GROUP = struct.Struct("<56sIIIiQQQI")
PRIVATE = struct.Struct("<QqII")
COMMON = struct.Struct("<QBBBBBBH")
OP = struct.Struct("<IIQqQQQQQIi")
PEER = struct.Struct("<QiIQQQQQQ")
SPAN = struct.Struct("<qQQI")

MAX_PRIVATE_BYTES = PRIVATE_BYTES - PRIVATE.size
"""Longest private state of one version."""

_C_TYPES = {"B": "u8", "H": "u16", "I": "u32", "i": "i32", "Q": "u64", "q": "i64"}


class Layout(msgspec.Struct, frozen=True):
    """One piece of the ring: its fields, `names` in order of the struct, from `offset` of its `place`."""

    title: str
    place: str
    offset: int
    form: struct.Struct
    names: str

    def fields(self) -> Iterator[tuple[int, str, str]]:
        """(offset, type, name) of every field."""
        offset, names = self.offset, iter(self.names.split())
        count = ""
        for letter in self.form.format[1:]:
            if letter.isdigit():
                count += letter
                continue
            yield offset, f"char[{count}]" if letter == "s" else _C_TYPES[letter], next(names)
            offset += struct.calcsize("<" + count + letter)
            count = ""


LAYOUTS = (
    Layout(
        "Header",
        "the ring",
        0,
        HEADER,
        "magic version slot_bytes capacity head dropped heartbeat_ns offset_ns pid rank generation flags step member",
    ),
    Layout(
        "Group table entry",
        f"byte {GROUPS_OFFSET} of the ring + {GROUP_BYTES} x number (0 to {GROUP_COUNT - 1})",
        0,
        GROUP,
        "name hash lane size group_rank queued started finished generation",
    ),
    Layout(
        "Private state",
        f"byte {HEADER_BYTES} of the ring for version % 3 = 0, byte {HEADER_BYTES + PRIVATE_BYTES} for 1, "
        "behind the slots for 2; the data follows",
        0,
        PRIVATE,
        "lock version length crc32",
    ),
    Layout(
        "Slot, all kinds",
        f"byte {SLOTS_OFFSET} of the ring + {SLOT_BYTES} x (index % capacity)",
        0,
        COMMON,
        "index+1 kind op algorithm element reduction status npeers",
    ),
    Layout(
        "Operation slot (kind 1)",
        "the slot",
        SLOT_BODY,
        OP,
        "group_hash generation sequence step count nbytes queued_ns started_ns finished_ns rank root",
    ),
    Layout(
        "Peer slot (kind 2)",
        "the slot",
        SLOT_BODY,
        PEER,
        "op_index peer transport bytes_sent bytes_received wait_own_ns wait_credit_ns wire_ns wait_peer_ns",
    ),
    Layout(
        "Span slot (kind 3; `op` is a SpanKind)",
        "the slot",
        SLOT_BODY,
        SPAN,
        "step began_ns ended_ns generation",
    ),
)


def ring_bytes(capacity: int = DEFAULT_CAPACITY) -> int:
    """Size in bytes of a ring with that many slots."""
    return SLOTS_OFFSET + capacity * SLOT_BYTES + PRIVATE_BYTES


def private_places(capacity: int) -> tuple[int, int, int]:
    """Where the private state of a version lies, by version % 3. The last one is behind the slots: a ring of a keepstep
    that kept two ends before it."""
    return HEADER_BYTES, HEADER_BYTES + PRIVATE_BYTES, SLOTS_OFFSET + capacity * SLOT_BYTES
