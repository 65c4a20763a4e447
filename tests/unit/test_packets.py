"""Messages cut into packets and put together: any size, and nothing foreign is taken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import TransportError
from keepstep.records.messages import MAX_MESSAGE_BYTES
from keepstep.store.packets import DESCRIPTOR_PACKET, MAX_PACKET_BYTES, Assembler, PacketKind, split_message

ROOM = MAX_PACKET_BYTES - 12


@given(st.lists(st.one_of(st.binary(max_size=50), st.integers(ROOM - 2, 3 * ROOM).map(lambda n: b"x" * n)), max_size=4))
def test_messages_come_back_whole_and_in_order(messages: list[bytes]) -> None:
    assembler = Assembler()
    came = []
    for message in messages:
        for packet in split_message(message):
            assert len(packet) <= MAX_PACKET_BYTES
            got = assembler.take(packet)
            if got is not None:
                came.append(got)
    assert came == [(PacketKind.MESSAGE, message) for message in messages]


def test_a_descriptor_may_come_between_messages() -> None:
    assembler = Assembler()
    assert assembler.take(DESCRIPTOR_PACKET) == (PacketKind.DESCRIPTOR, b"")
    assert assembler.take(next(split_message(b"m"))) == (PacketKind.MESSAGE, b"m")


@pytest.mark.parametrize(
    "packet",
    [
        b"GET / HTTP",
        b"GET / HTTP/1.1",
        struct.pack("<HBBII", 0x4B53, 3, 0, 1, 0) + b"x",
        struct.pack("<HBBII", 0x4B53, 1, 1, 1, 0) + b"x",
        struct.pack("<HBBII", 0x4B53, 1, 0, MAX_MESSAGE_BYTES + 1, 0) + b"x",
        struct.pack("<HBBII", 0x4B53, 1, 0, 1, 0) + b"xx",
        struct.pack("<HBBII", 0x4B53, 1, 0, 2, 1) + b"x",
        struct.pack("<HBBII", 0x4B53, 1, 0, 2, 0),
    ],
)
def test_foreign_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(TransportError):
        Assembler().take(packet)


def test_a_part_of_another_message_is_refused() -> None:
    first, second = (list(split_message(letter * (ROOM + 10))) for letter in (b"a", b"b"))
    assembler = Assembler()
    assembler.take(first[0])
    with pytest.raises(TransportError, match="fit together"):
        assembler.take(second[0])
