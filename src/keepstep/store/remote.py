"""The link between controller and agents across hosts: websockets, with proof of a shared token.

The token never travels and no frame can be injected (see `challenge`), but contents are not encrypted: use it on a
network you trust. Host names are resolved by the system; nothing here asks reverse DNS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from keepstep.errors import EnvironmentProblem, KeepstepError, MembershipError, PeerLost, TransportError, UsageError
from keepstep.store.challenge import NONCE_BYTES, PROOF_BYTES, Seals, proof, proves
from keepstep.store.connections import Connections
from keepstep.store.inbox import Inbox
from keepstep.store.remote_peer import MAX_ENVELOPE_BYTES, Envelope, RemotePeer, decode_envelope, encode_envelope

__all__ = ["MAX_UNSENT_BYTES", "RemoteServer", "WebsocketPeer", "connect_remote", "serve_remote"]

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""What may wait for a peer that does not read before posting to it fails."""

_MAX_FRAME_BYTES = MAX_ENVELOPE_BYTES + 64
_HANDSHAKE_S = 10.0
_SILENCE_S = 30.0
_PINGS = 4
"""So many pings in the time of silence after which the other side counts as gone."""
_WRONG_TOKEN = 4401
_INBOX_ENVELOPES = 256

_quiet = logging.getLogger("keepstep.store.remote.websockets")
_quiet.setLevel(logging.CRITICAL)  # a port scan is no news; what matters is raised as an error here


class WebsocketPeer:
    """One end of an authenticated link. Two tasks serve it: one reads, one writes."""

    def __init__(self, link: Connection, seals: Seals, *, where: str) -> None:
        self.where = where
        self._link = link
        self._seals = seals
        self._room = asyncio.Event()
        self._room.set()
        self._inbox: Inbox[Envelope] = Inbox(limit=_INBOX_ENVELOPES, on_room=self._room.set)
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._unsent = 0
        self._lost: KeepstepError | None = None
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    @property
    def closed(self) -> bool:
        """True once the link is closed or the other side is gone."""
        return self._lost is not None

    def post(self, envelope: Envelope) -> None:
        """Send without waiting.

        Raises PeerLost if the other side is gone, and TransportError if MAX_UNSENT_BYTES wait for it already.
        """
        data = encode_envelope(envelope)
        if self._lost is not None:
            raise PeerLost(self._lost.what, where=self.where)
        if self._unsent + len(data) > MAX_UNSENT_BYTES:
            raise TransportError(f"the other side has not read {self._unsent} bytes", where=self.where)
        self._unsent += len(data)
        self._outgoing.put_nowait(data)

    async def send(self, envelope: Envelope) -> None:
        """`post`, then wait until everything posted has left this process. Raises as `post` does."""
        self.post(envelope)
        await self._outgoing.join()
        if self._lost is not None:
            raise PeerLost(self._lost.what, where=self.where)

    async def receive(self) -> Envelope:
        """The next envelope. Raises PeerLost at the end, TransportError or RecordError for foreign bytes."""
        return await self._inbox.take()

    async def answers(self, timeout_s: float) -> bool:
        """Whether the other side gives a sign of life within so many seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await (await self._link.ping())
        except (ConnectionClosed, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """End the link after sending what was posted. May be called twice."""
        if self._lost is None:
            try:
                await asyncio.wait_for(self._outgoing.join(), timeout=_HANDSHAKE_S)
            except TimeoutError:
                pass  # the other side does not read: what was posted is dropped
        await self._finish(PeerLost("the link is closed", where=self.where))
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _read(self) -> None:
        why: KeepstepError = PeerLost("the other side is gone", where=self.where)
        try:
            while True:
                frame = await self._link.recv(decode=False)
                self._inbox.put(decode_envelope(self._seals.open(frame)))
                if self._inbox.full:
                    self._room.clear()
                    await self._room.wait()
        except ConnectionClosed:
            pass
        except KeepstepError as error:
            why = error
        await self._finish(why)

    async def _write(self) -> None:
        while True:
            data = await self._outgoing.get()
            try:
                if self._lost is None:
                    await self._link.send(self._seals.seal(data))
            except ConnectionClosed:
                pass  # the reader sees it too and ends the link
            finally:
                self._unsent -= len(data)
                self._outgoing.task_done()

    async def _finish(self, why: KeepstepError) -> None:
        if self._lost is None:
            self._lost = why
            self._inbox.end(why)
            self._drop_outgoing()
            self._writer.cancel()
        self._room.set()
        await self._link.close()

    def _drop_outgoing(self) -> None:
        while not self._outgoing.empty():
            self._unsent -= len(self._outgoing.get_nowait())
            self._outgoing.task_done()


class RemoteServer:
    """The listening side: `port` is the real one, also where 0 was asked for."""

    def __init__(self, server: Server, connections: Connections) -> None:
        self._server = server
        self._connections = connections
        self.port: int = next(iter(server.sockets)).getsockname()[1]

    async def close(self) -> None:
        """Stop listening and end all links. May be called twice."""
        self._server.close(close_connections=False)
        await self._connections.close()
        await self._server.wait_closed()


async def serve_remote(
    host: str, port: int, *, token: str, on_peer: Callable[[RemotePeer], Awaitable[None]], silence_s: float = _SILENCE_S
) -> RemoteServer:
    """Listen on `host`:`port` (0: any free port); `on_peer` runs as a task for each agent that proves the token.

    The link is closed when `on_peer` returns. PeerLost raised in it is the normal end; any other exception goes to
    the event loop's exception handler. An agent that is silent for `silence_s` seconds counts
    as gone. Raises EnvironmentProblem if the port is in use or the host is not here.
    """
    connections = Connections()

    async def attend(link: ServerConnection) -> None:
        done = asyncio.Event()
        connections.start(_attend(link, token=token, on_peer=on_peer, done=done))
        await done.wait()

    try:
        server = await serve_websocket(
            attend,
            host,
            port,
            compression=None,
            max_size=_MAX_FRAME_BYTES,
            open_timeout=_HANDSHAKE_S,
            close_timeout=1.0,
            ping_interval=silence_s / _PINGS,
            ping_timeout=silence_s - silence_s / _PINGS,
            server_header=None,
            logger=_quiet,
        )
    except (OSError, OverflowError) as error:
        raise _cannot_listen(error, f"{host}:{port}") from error
    return RemoteServer(server, connections)


def _cannot_listen(error: OSError | OverflowError, where: str) -> EnvironmentProblem:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return EnvironmentProblem("the port is in use", where=where, remedy="choose another port, or 0 for any")
    return EnvironmentProblem(f"cannot listen: {error}", where=where, remedy="choose an address of this host")


async def _attend(
    link: ServerConnection, *, token: str, on_peer: Callable[[RemotePeer], Awaitable[None]], done: asyncio.Event
) -> None:
    try:
        try:
            seals = await asyncio.wait_for(_challenge(link, token), timeout=_HANDSHAKE_S)
        except (ConnectionClosed, TimeoutError, OSError):
            return
        if seals is None:
            await link.close(_WRONG_TOKEN, "wrong token")
            return
        peer = WebsocketPeer(link, seals, where=_address_of(link))
        try:
            await on_peer(peer)
        finally:
            await peer.close()
    finally:
        done.set()


async def _challenge(link: ServerConnection, token: str) -> Seals | None:
    """The listening side of the proof; None if the other side does not know the token."""
    mine = os.urandom(NONCE_BYTES)
    await link.send(mine)
    answer = await link.recv(decode=False)
    theirs, said = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    nonces = mine + theirs
    if len(theirs) != NONCE_BYTES or not proves(said, token, part=b"connects", nonces=nonces):
        return None
    await link.send(proof(token, b"listens", nonces=nonces))
    return Seals(proof(token, b"seals", nonces=nonces), listens=True)


def _address_of(link: Connection) -> str:
    address = link.remote_address
    return f"{address[0]}:{address[1]}" if address else "unknown address"


async def connect_remote(
    address: str, *, token: str, timeout_s: float = 10.0, silence_s: float = _SILENCE_S
) -> RemotePeer:
    """Connect to the controller at `address` (HOST:PORT) and prove the token, each side to the other.

    Raises UsageError for a nonsense address, EnvironmentProblem if nobody listens there (any more) or answers within
    `timeout_s` seconds, and MembershipError if the token is wrong or the listener is not a keepstep controller.
    """
    host, port = _split_address(address)
    try:
        async with asyncio.timeout(timeout_s), contextlib.AsyncExitStack() as unless_proved:
            link = await _open(f"ws://{host}:{port}", silence_s)
            unless_proved.push_async_callback(link.close)
            seals = await _answer(link, token, address=address)
            unless_proved.pop_all()
    except TimeoutError as error:
        raise _no_controller(f"no answer within {timeout_s} s", address) from error
    except (InvalidMessage, InvalidHandshake) as error:
        if _closing(error):
            raise _no_controller("the controller is closing", address) from error
        raise _not_keepstep(address) from error
    except socket.gaierror as error:
        raise _no_controller(f"the host name is not known: {error.strerror}", address) from error
    except OSError as error:
        raise _no_controller(f"cannot connect: {_reason(error)}", address) from error
    return WebsocketPeer(link, seals, where=address)


async def _open(url: str, silence_s: float) -> Connection:
    return await connect(
        url,
        compression=None,
        max_size=_MAX_FRAME_BYTES,
        open_timeout=None,
        close_timeout=1.0,
        ping_interval=silence_s / _PINGS,
        ping_timeout=silence_s - silence_s / _PINGS,
        proxy=None,
        user_agent_header=None,
        logger=_quiet,
    )


async def _answer(link: Connection, token: str, *, address: str) -> Seals:
    """The connecting side of the proof."""
    mine = os.urandom(NONCE_BYTES)
    try:
        theirs = await link.recv(decode=False)
        if len(theirs) != NONCE_BYTES:
            raise _not_keepstep(address)
        nonces = theirs + mine
        await link.send(mine + proof(token, b"connects", nonces=nonces))
        said = await link.recv(decode=False)
    except ConnectionClosed as error:
        if link.close_code == _WRONG_TOKEN:
            raise _wrong_token("the controller refused the token", address) from error
        raise _no_controller("the controller closed the connection", address) from error
    if len(said) != PROOF_BYTES or not proves(said, token, part=b"listens", nonces=nonces):
        raise _wrong_token("the controller could not prove the token", address)
    return Seals(proof(token, b"seals", nonces=nonces), listens=False)


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bad = not colon or not bare or any(not (c.isalnum() or c in ".-_:%") for c in bare)
    if bad or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 65536:
        raise UsageError(f"{address[:80]!r} is not a controller address", remedy="write HOST:PORT")
    return (f"[{bare}]" if ":" in bare else bare), int(port)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _no_controller(what: str, address: str) -> EnvironmentProblem:
    return EnvironmentProblem(what, where=address, remedy="is `keepstep controller` running there, and reachable?")


def _wrong_token(what: str, address: str) -> MembershipError:
    return MembershipError(what, where=address, remedy="give both sides the same token")


def _closing(error: InvalidHandshake) -> bool:
    """Whether a listener that is about to close gave this answer, or none: it may be a controller."""
    if isinstance(error, InvalidStatus):
        return error.response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    return isinstance(error, InvalidMessage) and isinstance(error.__cause__, EOFError)


def _not_keepstep(address: str) -> MembershipError:
    return MembershipError("what listens there is not a keepstep controller", where=address, remedy="check the port")
