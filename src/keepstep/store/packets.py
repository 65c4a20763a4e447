"""Messages of a local link cut into packets, and put together again.

A packet on a SOCK_SEQPACKET socket is limited by the send buffer, so a message travels as several. Each packet has a
header of 12 bytes (little endian): u16 magic 0x4B53, u8 kind (1 message, 2 descriptor), u8 zero, u32 length of the
whole message, u32 offset of this part. A descriptor packet has no payload; the descriptor rides beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from keepstep.errors import TransportError
from keepstep.records.messages import MAX_MESSAGE_BYTES

__all__ = ["DESCRIPTOR_PACKET", "MAX_PACKET_BYTES", "Assembler", "PacketKind", "split_message"]

MAX_PACKET_BYTES = 32 * 1024
"""Longest packet, header included."""

_HEADER = struct.Struct("<HBBII")
_MAGIC = 0x4B53


class PacketKind(IntEnum):
    """What a packet carries."""

    MESSAGE = 1
    DESCRIPTOR = 2


DESCRIPTOR_PACKET = _HEADER.pack(_MAGIC, PacketKind.DESCRIPTOR, 0, 0, 0)


def split_message(data: bytes) -> Iterator[bytes]:
    """The packets that carry `data`, in order; at least one."""
    room = MAX_PACKET_BYTES - _HEADER.size
    for offset in range(0, max(len(data), 1), room):
        yield _HEADER.pack(_MAGIC, PacketKind.MESSAGE, 0, len(data), offset) + data[offset : offset + room]


class Assembler:
    """Puts the packets of one direction together. Holds at most one unfinished message of MAX_MESSAGE_BYTES."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._length = 0

    def take(self, packet: bytes) -> tuple[PacketKind, bytes] | None:
        """What `packet` completes: (kind, message bytes), or None in mid-message.

        Raises TransportError for bytes that are not such a packet or do not follow the last one.
        """
        if len(packet) < _HEADER.size:
            raise TransportError(f"a packet of {len(packet)} bytes is not from keepstep")
        magic, kind, zero, length, offset = _HEADER.unpack_from(packet)
        if magic != _MAGIC or zero or kind not in (PacketKind.MESSAGE, PacketKind.DESCRIPTOR):
            raise TransportError("a packet without keepstep's header")
        if kind == PacketKind.DESCRIPTOR:
            return PacketKind.DESCRIPTOR, b""
        return self._take_part(packet[_HEADER.size :], length, offset=offset)

    def _take_part(self, part: bytes, length: int, *, offset: int) -> tuple[PacketKind, bytes] | None:
        if length > MAX_MESSAGE_BYTES:
            raise TransportError(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if offset == 0 and not self._part:
            self._length = length
        fits = offset == len(self._part) and length == self._length and offset + len(part) <= length
        if not fits or (not part and length):
            raise TransportError("packets of a message do not fit together")
        self._part += part
        if len(self._part) < length:
            return None
        data = bytes(self._part)
        self._part = bytearray()
        return PacketKind.MESSAGE, data
