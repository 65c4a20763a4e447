"""Which source ports share a path, without raw sockets: whoever shares it with a loaded connection waits longer.

A reference connection from one port is filled; the handshakes of the other ports are timed meanwhile. Those that
wait share its path; the rest are tried again with a reference of their own, until all are told apart. The far end
is a sink that throws away what proves to come from a holder of the token.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import statistics
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence

from keepstep.errors import EnvironmentProblem, TransportError
from keepstep.service.clock import Clock
from keepstep.service.path_probing import Target, handshakes
from keepstep.store.challenge import NONCE_BYTES, PROOF_BYTES, proof, proves
from keepstep.traffic.catalogue import split_by_load

__all__ = ["LoadSink", "ports_by_load"]

_PIECE = bytes(64 * 1024)
_WARM_S = 0.3
_ROUNDS = 7
_LEAST_ROUNDS = 3
_FULL_BYTES = 32 * 1024
_SEND_BUFFER = 4 << 20
_MAX_GROUPS = 64
_PATIENCE_S = 5.0
_SUSPICIOUS = 8
_MOSTLY = 0.9


class LoadSink:
    """Listens on `address` (host, port; port 0: any) until closed and discards what authenticated callers send."""

    def __init__(self, address: tuple[str, int], *, token: str) -> None:
        """Raises EnvironmentProblem if it cannot listen there."""
        try:
            self._listener = socket.create_server(address, backlog=128)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise EnvironmentProblem(
                f"cannot listen on {where}: {error.strerror}", where=where, remedy="choose an address of this host"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        self._token = token
        self._thread = threading.Thread(target=self._accept, name="keepstep-sink", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; running callers are cut off."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._discard, args=(caller,), name="keepstep-sink", daemon=True).start()

    def _discard(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.settimeout(_PATIENCE_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            caller.sendall(nonce)
            said = _exactly(caller, PROOF_BYTES)
            if not proves(said, self._token, part=b"connects", nonces=nonce):
                return
            space = bytearray(1 << 20)
            while caller.recv_into(space):
                pass


def ports_by_load(target: Target, ports: Sequence[int], *, token: str, clock: Clock) -> list[tuple[int, ...]]:
    """Groups of source ports that share a path to the sink at `target`. Takes about a second for each group.

    Raises TransportError if the sink does not answer or refuses the token, EnvironmentProblem where all ports wait
    alike: there is one path only, or this host's own link fills up first.
    """
    idle = _round_trips(target, ports, clock=clock)
    left = [port for port in ports if port in idle]
    groups: list[list[int]] = []
    while left and len(groups) < _MAX_GROUPS:
        reference, *others = left
        earlier = {group[0]: group for group in groups}  # a path that a pause of the load hid gets a second chance
        with _loaded(target, reference, token=token) as full:
            loaded = _round_trips(target, [*others, *earlier], clock=clock, full=full)
        sharing = split_by_load(idle, loaded)
        everybody = bool(others) and not groups and len(sharing) == len(others)
        if everybody or len(sharing) >= max(_SUSPICIOUS, _MOSTLY * (len(idle) - 1)):
            raise _untold(target, f"{len(sharing)} of {len(others)} ports wait alike behind the load")
        group = next((earlier[port] for port in earlier if port in sharing), None)
        if group is None:
            groups.append(group := [])
        group += [reference, *sorted(sharing.intersection(others))]
        left = [port for port in others if port not in sharing]
    if len(ports) >= 2 * _SUSPICIOUS and len(groups) > len(ports) // 2:
        raise _untold(target, f"{len(groups)} groups for {len(ports)} ports: the load does not show")
    return [tuple(group) for group in groups]


def _untold(target: Target, what: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{what}; there may be one path only, or this host's own link fills before the paths do",
        where=target.source,
        remedy="probe with CAP_NET_RAW, or with fewer connections on this host",
    )


def _round_trips(
    target: Target, ports: Sequence[int], *, clock: Clock, full: Callable[[], bool] = lambda: True
) -> dict[int, float]:
    """The median time of each port over some rounds, of those that the load did not pause in."""
    seen: dict[int, list[float]] = {}
    for _ in range(_ROUNDS):
        for port in ports:
            loaded = full()
            times = handshakes(target, (port,), clock=clock).round_trip_s
            if times and loaded and full():
                seen.setdefault(port, []).append(times[port])
    return {port: statistics.median(values) for port, values in seen.items() if len(values) >= _LEAST_ROUNDS}


@contextlib.contextmanager
def _loaded(target: Target, port: int, *, token: str) -> Iterator[Callable[[], bool]]:
    """Keeps the path of `port` full inside the block; gives a function that tells whether it is full now."""
    try:
        sock = socket.create_connection(target[1:], _PATIENCE_S, source_address=(target.source, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # a sender that is held up pauses nothing
        sock.sendall(proof(token, b"connects", nonces=_exactly(sock, NONCE_BYTES)))
    except OSError as error:
        where = f"{target.destination}:{target.port}"
        raise TransportError(f"no answer from the sink: {error}", where=where, remedy="start it there first") from error
    sender = threading.Thread(target=_fill, args=(sock,), name="keepstep-load", daemon=True)
    sender.start()
    threading.Event().wait(_WARM_S)
    try:
        if not sender.is_alive():
            raise TransportError("the sink hung up", remedy="give both ends the same token file")
        yield lambda: _waiting_bytes(sock) > _FULL_BYTES
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        sender.join(_PATIENCE_S)


def _waiting_bytes(sock: socket.socket) -> int:
    """Bytes that were written and not yet acknowledged (SIOCOUTQ)."""
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _fill(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(_PIECE)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("hung up")
        data += piece
    return data
