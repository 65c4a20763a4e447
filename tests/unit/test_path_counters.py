"""The kernel's counters of real connections: what was acknowledged, and how long there was something to send."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from keepstep.records.path_messages import Carried, Way
from keepstep.service.path_counters import carried_by_ways


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket, Way]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as dialer:
        accepted, _ = server.accept()
        with accepted:
            yield dialer, accepted, Way(*dialer.getsockname(), *dialer.getpeername())


def fill(dialer: socket.socket, *, timeout_s: float) -> None:
    """Send until there has been no room for so long."""
    dialer.settimeout(timeout_s)
    with suppress(TimeoutError):
        while True:
            dialer.send(bytes(1 << 20))


def back(way: Way) -> Way:
    return Way(way.destination, way.port, way.source, way.source_port)


def test_each_direction_has_its_own_bytes() -> None:
    with connection() as (dialer, accepted, way):
        dialer.sendall(bytes(50_000))
        accepted.recv(50_000, socket.MSG_WAITALL)
        there, again = carried_by_ways((way, back(way)))
    assert 50_000 <= there.nbytes <= 50_001  # the kernel counts the first packet of a connection as a byte
    assert again.nbytes <= 1
    assert there.busy_us >= 0


def test_a_receiver_without_room_is_not_the_path() -> None:
    with connection() as (dialer, accepted, way):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        fill(dialer, timeout_s=0.1)
        first = carried_by_ways((way,))[0]
        began = time.monotonic()
        fill(dialer, timeout_s=0.5)
        waited = time.monotonic() - began
        later = carried_by_ways((way,))[0]
    assert first.nbytes > 0
    assert later.busy_us - first.busy_us < 0.5 * waited * 1e6


def test_no_such_connection_is_zeros_and_does_not_disturb_the_others() -> None:
    with connection() as (dialer, accepted, way):
        dialer.sendall(bytes(1000))
        accepted.recv(1000, socket.MSG_WAITALL)
        missing = Way("127.0.0.1", 1, "127.0.0.1", 2)
        found = carried_by_ways((missing, way, Way("no address", 1, "::1", 2), way))
    assert found[0] == found[2] == Carried()
    assert found[1].nbytes == found[3].nbytes >= 1000
    assert carried_by_ways(()) == ()
