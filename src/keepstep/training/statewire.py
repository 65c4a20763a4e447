"""The few messages between a joiner and the members it takes state from, over an authenticated stream socket.

Request: magic, kind, first, count (u32 each). Reply: magic, status, length, then the bytes. Kinds: the digest of the
state, its manifest with the digests of all chunks, or a range of chunks.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

from keepstep.errors import PeerLost, TornRecord

__all__ = [
    "MAX_CHUNKS",
    "MAX_MANIFEST_BYTES",
    "Ask",
    "Status",
    "ask",
    "next_request",
    "receive_exactly",
    "receive_header",
    "receive_into",
    "reply",
    "set_timeout",
]

MAX_CHUNKS = 4096
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_MAX_PARTS = 512
_REQUEST = struct.Struct("<4sIII")
_REPLY = struct.Struct("<4sIQ")
_ASKS = b"KSTQ"
_SAYS = b"KSTR"


class Ask(IntEnum):
    """What a request asks for."""

    DIGEST = 1
    MANIFEST = 2
    CHUNKS = 3


class Status(IntEnum):
    """How a request was answered."""

    OK = 0
    NO_STATE = 1
    REFUSED = 2


def set_timeout(sock: socket.socket, timeout_s: float, *, waits: bool = False) -> None:
    """Give up on a peer that moves no byte for `timeout_s` seconds; calls stay blocking, so large reads stay whole.

    With `waits` it may send its next bytes at any time; what is sent to it must be taken."""
    sock.setblocking(True)
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(len(limit)) if waits else limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def ask(sock: socket.socket, kind: Ask, *, first: int = 0, count: int = 0) -> None:
    """Send one request. Raises OSError."""
    sock.sendall(_REQUEST.pack(_ASKS, kind, first, count))


def next_request(sock: socket.socket) -> tuple[int, int, int] | None:
    """Kind, first and count of the next request; None when the client has hung up. Raises TornRecord for nonsense."""
    data = bytearray(_REQUEST.size)
    got = sock.recv_into(data, len(data), socket.MSG_WAITALL)
    if got == 0:
        return None
    if got != len(data):
        raise PeerLost("the connection of a state transfer ended inside a request")
    magic, kind, first, count = _REQUEST.unpack(data)
    if magic != _ASKS:
        raise TornRecord(f"not a request for state: {bytes(data)!r}")
    return kind, first, count


def reply(sock: socket.socket, status: Status, *, parts: Sequence[bytes | memoryview] = ()) -> None:
    """Send one reply, gathered from `parts` without copying them. Raises OSError."""
    header = _REPLY.pack(_SAYS, status, sum(len(part) for part in parts))
    waiting = [memoryview(header), *(memoryview(part) for part in parts if len(part))]
    at = 0
    while at < len(waiting):
        sent = sock.sendmsg(waiting[at : at + _MAX_PARTS])
        at = _advance(waiting, at, count=sent)


def receive_header(sock: socket.socket) -> tuple[int, int]:
    """Status and length of the next reply. Raises PeerLost at the end, TornRecord for nonsense."""
    magic, status, length = _REPLY.unpack(receive_exactly(sock, _REPLY.size))
    if magic != _SAYS:
        raise TornRecord("not a reply of a state server")
    return int(status), int(length)


def receive_exactly(sock: socket.socket, count: int) -> bytearray:
    """The next `count` bytes. Raises PeerLost at the end."""
    data = bytearray(count)
    receive_into(sock, [memoryview(data)])
    return data


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all `views`. Raises PeerLost at the end, OSError."""
    waiting = [view for view in views if len(view)]
    at = 0
    while at < len(waiting):
        some = waiting[at : at + _MAX_PARTS]
        if len(some) == 1:
            got = sock.recv_into(some[0], len(some[0]), socket.MSG_WAITALL)
        else:
            got = sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
        if got == 0:
            raise PeerLost("the connection of a state transfer ended early")
        at = _advance(waiting, at, count=got)


def _advance(waiting: list[memoryview], at: int, *, count: int) -> int:
    """Where to go on after `count` bytes from the parts at `at` were moved; a part moved in half is cut."""
    while count:
        part = waiting[at]
        if count < len(part):
            waiting[at] = part[count:]
            break
        count -= len(part)
        at += 1
    return at
