"""Which source ports share a path, without raw sockets: whoever shares it with a loaded connection waits longer.

A reference connection from one port is filled; the handshakes of the other ports are timed meanwhile. Those that
wait share its path; the rest are tried again with a reference of their own, until all are told apart. The far end
is a sink that throws away what proves to come from a holder of the token.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence

from keepstep.errors import EnvironmentProblem, TransportError
from keepstep.service.clock import Clock
from keepstep.service.path_probing import Target, handshakes
from keepstep.store.challenge import NONCE_BYTES, PROOF_BYTES, proof, proves
from keepstep.traffic.catalogue import split_by_load

__all__ = ["LoadSink", "ports_by_load"]

_PIECE = bytes(64 * 1024)
_WARM_S = 0.3
_ROUNDS = 5
_MAX_GROUPS = 64
_PATIENCE_S = 5.0
_SUSPICIOUS = 8


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

    Raises TransportError if the sink does not answer or refuses the token, EnvironmentProblem where this host's own
    link fills up first, so that all ports wait alike.
    """
    idle = _shortest(target, ports, clock=clock)
    left = [port for port in ports if port in idle]
    groups: list[tuple[int, ...]] = []
    while left and len(groups) < _MAX_GROUPS:
        reference, *others = left
        with _loaded(target, reference, token=token):
            loaded = _shortest(target, others, clock=clock)
        sharing = split_by_load(idle, loaded)
        if not groups and len(others) >= _SUSPICIOUS and len(sharing) == len(others):
            raise EnvironmentProblem(
                f"all {len(others)} ports wait alike behind the load: this host's own link fills before the paths do",
                where=target.source,
                remedy="probe with CAP_NET_RAW, or give the path a load from another host",
            )
        groups.append((reference, *sorted(sharing)))
        left = [port for port in others if port in loaded and port not in sharing]
    return groups


def _shortest(target: Target, ports: Sequence[int], *, clock: Clock) -> dict[int, float]:
    seen: dict[int, list[float]] = {}
    for _ in range(_ROUNDS):
        for port, seconds in handshakes(target, ports, clock=clock).round_trip_s.items():
            seen.setdefault(port, []).append(seconds)
    return {port: min(values) for port, values in seen.items()}


@contextlib.contextmanager
def _loaded(target: Target, port: int, *, token: str) -> Iterator[None]:
    """Keeps the path of `port` full inside the block."""
    try:
        sock = socket.create_connection(target[1:], _PATIENCE_S, source_address=(target.source, port))
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
        yield
    finally:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        sender.join(_PATIENCE_S)


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
