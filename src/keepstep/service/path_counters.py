"""How fast do the bytes of a connection arrive? The kernel of its sender counts what was acknowledged, and how long
there was something to send.

Asked through sock_diag(7), one connection at a time, by its addresses and ports; needs no privilege. The fields are
those of `struct tcp_info` in linux/tcp.h: tcpi_bytes_acked (since Linux 4.1), tcpi_busy_time and tcpi_rwnd_limited
(4.9). Time in which the receiver had no room is not the path's, and left out. IPv4 only, as probing is.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from keepstep.records.path_messages import Carried, Way

__all__ = ["carried_by_ways"]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST = 1  # NLM_F_REQUEST
_INFO = 2  # INET_DIAG_INFO
_ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_DIAG = struct.Struct("=BBBxI")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_BYTES = _HEADER.size + 72  # of struct inet_diag_msg; attributes follow
_ACKED_AT, _BUSY_AT, _ROOM_AT, _ENOUGH = 120, 168, 176, 184
_TIMEOUT_S = 1.0
_MOST_BYTES = 65536


def carried_by_ways(ways: Sequence[Way]) -> tuple[Carried, ...]:
    """What the connection of each way has carried from `source` to `destination`; zeros where this host has none, or
    where the kernel does not say."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            return tuple(_asked(kernel, way, number=number) for number, way in enumerate(ways, 1))
    except OSError:  # a kernel without sock_diag, or one that forbids it
        return (Carried(),) * len(ways)


def _asked(kernel: socket.socket, way: Way, *, number: int) -> Carried:
    try:
        ends = [socket.inet_aton(way.source), socket.inet_aton(way.destination)]
    except OSError:  # not IPv4
        return Carried()
    identity = struct.pack("!HH16s16s", way.source_port, way.port, *ends) + struct.pack("=III", 0, *[_ANY_COOKIE] * 2)
    body = _DIAG.pack(socket.AF_INET, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0xFFFFFFFF) + identity
    kernel.sendto(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, number, 0) + body, (0, 0))
    while True:
        answer = kernel.recv(_MOST_BYTES)
        if len(answer) >= _HEADER.size and _HEADER.unpack_from(answer)[3] == number:
            return _read(answer)


def _read(answer: bytes) -> Carried:
    """The counters in one answer of the kernel; zeros if it is an error or an answer without them."""
    length, kind, *_ = _HEADER.unpack_from(answer)
    at, end = _ANSWER_BYTES, min(length, len(answer))
    while kind == _SOCK_DIAG_BY_FAMILY and at + _ATTRIBUTE.size <= end:
        size, name = _ATTRIBUTE.unpack_from(answer, at)
        info = answer[at + _ATTRIBUTE.size : at + size]
        if name == _INFO and len(info) >= _ENOUGH:
            acked, busy, room = (struct.unpack_from("=Q", info, where)[0] for where in (_ACKED_AT, _BUSY_AT, _ROOM_AT))
            return Carried(acked, max(0, busy - room))
        at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    return Carried()
