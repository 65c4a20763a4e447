"""Which way does a connection go? A SYN with the true ports and a short life dies at a switch, which says so.

A switch chooses among equal ways by a hash of addresses and ports, so the answer for a source port holds for every
later connection from it, until the network changes. Where raw sockets are not allowed, `path_load` tells by waiting
times instead. IPv4 only: the quoted header of the ICMP answer is what names the port.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from keepstep.errors import EnvironmentProblem, UsageError
from keepstep.records.path_messages import Way
from keepstep.service.clock import Clock

__all__ = [
    "MAX_PORTS",
    "Target",
    "Times",
    "handshakes",
    "hops_by_port",
    "hops_of_ways",
    "own_address",
    "raw_allowed",
    "resolved",
    "taken_ports",
]

MAX_PORTS = 512
_TIME_EXCEEDED = 11
_TRIES = 5
_PAUSE_S = 0.02
_AT_ONCE = 32  # switches answer so many at once and not many more
_NO_LINGER = struct.pack("ii", 1, 0)
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


class Target(NamedTuple):
    """From `source` (an address of this host) to a listening TCP `port` of `destination`."""

    source: str
    destination: str
    port: int


class Times(NamedTuple):
    """Round trips in s by source port; `silent` were not answered in time, `taken` are in use here."""

    round_trip_s: dict[int, float]
    silent: tuple[int, ...]
    taken: tuple[int, ...]


def resolved(destination: str, port: int) -> Target:
    """The target as addresses. Raises UsageError for a name or port that is none, EnvironmentProblem without a way."""
    if not 0 < port < 65536:
        raise UsageError(f"port {port} of {destination}", remedy="give the listening port as HOST:PORT, 1 to 65535")
    try:
        address = socket.getaddrinfo(destination, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UsageError(
            f"{destination} is no IPv4 host: {error.strerror or error}", remedy="give a name or address that resolves"
        ) from error
    return Target(own_address(str(address)), str(address), port)


def own_address(destination: str) -> str:
    """The address of this host that faces `destination`. Raises EnvironmentProblem where no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError as error:
            raise EnvironmentProblem(f"no route to {destination}: {error.strerror}", where=destination) from error
        return str(probe.getsockname()[0])


def raw_allowed() -> bool:
    """Whether this process may read ICMP (root, or CAP_NET_RAW)."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    except PermissionError:
        return False
    return True


def hops_by_port(
    target: Target, ports: Iterable[int], *, ttl: int, clock: Clock, timeout_s: float = 0.5
) -> dict[int, str]:
    """The address of the switch where a connection from each port is after `ttl` hops; ports that got no answer are
    missing. A target closer than that answers itself: then the result is empty. Raises PermissionError without raw
    sockets."""
    found: dict[int, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as listener:
        listener.setblocking(False)
        for _ in range(_TRIES):
            missing = [port for port in ports if port not in found]
            for start in range(0, len(missing), _AT_ONCE):
                found |= _one_volley(
                    listener,
                    target,
                    ports=missing[start : start + _AT_ONCE],
                    ttl=ttl,
                    now=clock.monotonic,
                    timeout_s=timeout_s,
                )
    return found


def handshakes(target: Target, ports: Iterable[int], *, clock: Clock, timeout_s: float = 1.0) -> Times:
    """The time a connection takes from each port, one after the other; each is closed at once with a reset, so that
    its port can be used again."""
    times: dict[int, float] = {}
    silent: list[int] = []
    taken: list[int] = []
    for port in ports:
        begin = clock.monotonic()
        try:
            with _bound(target, port) as sock:
                sock.settimeout(timeout_s)
                sock.connect((target.destination, target.port))
                times[port] = clock.monotonic() - begin
        except OSError as error:
            (taken if error.errno in _TAKEN else silent).append(port)
    return Times(times, tuple(silent), tuple(taken))


def taken_ports(target: Target, ports: Iterable[int]) -> frozenset[int]:
    """The ports that no connection to `target` can leave from now, because something else on this host uses them."""
    found: set[int] = set()
    for port in ports:
        try:
            with _bound(target, port) as sock:
                sock.setblocking(False)
                why = sock.connect_ex((target.destination, target.port))
        except OSError as error:
            why = error.errno or 0
        if why in _TAKEN:
            found.add(port)
    return frozenset(found)


@contextlib.contextmanager
def _bound(target: Target, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.bind((target.source, port))
        yield sock


def _one_volley(
    listener: socket.socket, target: Target, *, ports: list[int], ttl: int, now: Callable[[], float], timeout_s: float
) -> dict[int, str]:
    found: dict[int, str] = {}
    with contextlib.ExitStack() as open_sockets:
        sent = 0
        for port in ports:
            with contextlib.suppress(OSError):
                sock = open_sockets.enter_context(_bound(target, port))
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
                sock.setblocking(False)
                sent += sock.connect_ex((target.destination, target.port)) in (0, errno.EINPROGRESS)
        deadline = now() + timeout_s
        while len(found) < sent and (left := deadline - now()) > 0:
            if not select.select([listener], [], [], left)[0]:
                break
            with contextlib.suppress(BlockingIOError):
                packet, (hop, _) = listener.recvfrom(2048)
                quoted = _quoted(packet)
                if quoted is not None and quoted[1:] == (target.destination, target.port):
                    found[quoted[0]] = hop
    return found


def _quoted(packet: bytes) -> tuple[int, str, int] | None:
    """Source port, destination and its port of the connection whose packet ran out of life; None for other news."""
    start = (packet[0] & 15) * 4 if packet else 0
    inner = packet[start + 8 :]
    if len(packet) < start + 8 or packet[start] != _TIME_EXCEEDED or len(inner) < 20:
        return None
    header = (inner[0] & 15) * 4
    if inner[9] != socket.IPPROTO_TCP or len(inner) < header + 4:
        return None
    source_port, port = struct.unpack_from("!HH", inner, header)
    return source_port, socket.inet_ntoa(inner[16:20]), port


def hops_of_ways(
    ways: Sequence[Way], ttls: Sequence[int], *, clock: Clock, timeout_s: float = 0.3
) -> tuple[tuple[str, ...], ...]:
    """The switch where a packet of each way is after each of `ttls` hops ("": no answer).

    Works beside connections in use, and for both of their directions: the packets are made by hand and die on the
    way. Raises PermissionError without raw sockets.
    """
    found: dict[tuple[Way, int], str] = {}
    with (
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as sender,
    ):
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # it only sends
        left = list(ways)
        for ttl in ttls:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            missing = left
            for attempt in range(_TRIES):
                answers = _ask_ways(sender, listener, ways=missing, now=clock.monotonic, timeout_s=timeout_s)
                found |= {(way, ttl): hop for way, hop in answers.items()}
                missing = [way for way in missing if way not in answers]
                if not missing or (attempt and not answers):
                    break
            left = [way for way in left if (way, ttl) in found]  # what is silent here is silent behind
    return tuple(tuple(found.get((way, ttl), "") for ttl in ttls) for way in ways)


def _ask_ways(
    sender: socket.socket,
    listener: socket.socket,
    *,
    ways: Sequence[Way],
    now: Callable[[], float],
    timeout_s: float,
) -> dict[Way, str]:
    wanted = {(way.source_port, way.destination, way.port): way for way in ways}
    found: dict[Way, str] = {}

    def listen(until: float, enough: int) -> None:
        while len(found) < enough and (left := until - now()) > 0:
            if not select.select([listener], [], [], left)[0]:
                return
            with contextlib.suppress(BlockingIOError):
                packet, (hop, _) = listener.recvfrom(2048)
                asked = wanted.get(_quoted(packet) or (0, "", 0))
                if asked is not None:
                    found[asked] = hop

    for start in range(0, len(ways), _AT_ONCE):
        before = len(found)
        for way in ways[start : start + _AT_ONCE]:
            with contextlib.suppress(OSError):
                sender.sendto(_segment(way), (way.destination, 0))
        listen(now() + _PAUSE_S, before + _AT_ONCE)
    listen(now() + timeout_s, len(ways))
    return found


def _segment(way: Way) -> bytes:
    """A bare TCP acknowledgement of the way, with its checksum (RFC 9293)."""
    head = struct.pack("!HHIIBBHHH", way.source_port, way.port, 0, 0, 5 << 4, 0x10, 0, 0, 0)
    addresses = socket.inet_aton(way.source) + socket.inet_aton(way.destination)
    pseudo = addresses + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(head))
    total = sum(struct.unpack(f"!{len(pseudo + head) // 2}H", pseudo + head))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head[:16] + struct.pack("!H", ~total & 0xFFFF) + head[18:]
