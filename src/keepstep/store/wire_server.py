"""The agent's end of the links to its members: an event loop, abstract sockets, nothing that can block it."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from keepstep.errors import EnvironmentProblem, KeepstepError, PeerLost, TransportError
from keepstep.records.messages import Message, decode_message, encode_message
from keepstep.store.connections import Connections
from keepstep.store.inbox import Inbox
from keepstep.store.packets import DESCRIPTOR_PACKET, MAX_PACKET_BYTES, Assembler, split_message
from keepstep.store.unix_socket import listen_unix, peer_pid

__all__ = ["MAX_UNREAD_BYTES", "AgentWire", "SocketAgentWire", "WireServer", "serve"]

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""What may wait for a member that does not read (a frozen one) before posting to it fails."""

_INBOX_MESSAGES = 64


class AgentWire(Protocol):
    """What an agent can do with the link to one member; `SocketAgentWire` and its twin both are one."""

    @property
    def pid(self) -> int:
        """The member's process id, as the kernel says."""

    @property
    def closed(self) -> bool:
        """True once the link is closed or the member is gone."""

    def post(self, message: Message) -> None:
        """Send without waiting. Raises PeerLost if gone and TransportError if too much is unread."""

    def post_descriptor(self, descriptor: int) -> None:
        """Send a duplicate of a file descriptor without waiting. Raises as `post` does."""

    async def send(self, message: Message) -> None:
        """`post`, then wait until the kernel has it."""

    async def send_descriptor(self, descriptor: int) -> None:
        """`post_descriptor`, then wait until the kernel has it."""

    async def receive(self) -> Message:
        """The next message. Raises PeerLost at the end. Cancelling it loses nothing."""

    async def close(self) -> None:
        """End the link, dropping what was posted and not sent. May be called twice."""


class SocketAgentWire:
    """The link over a non-blocking socket; reads and writes happen in event loop callbacks."""

    def __init__(self, link: socket.socket, *, pid: int) -> None:
        self.pid = pid
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler()
        self._inbox: Inbox[Message] = Inbox(limit=_INBOX_MESSAGES, on_room=self._start_reading)
        self._outgoing: deque[tuple[bytes, int | None]] = deque()
        self._unread = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._lost: PeerLost | None = None
        self._start_reading()

    @property
    def closed(self) -> bool:
        """True once the link is closed or the member is gone."""
        return self._lost is not None

    def post(self, message: Message) -> None:
        """Send without waiting.

        Raises PeerLost if the member is gone, and TransportError if MAX_UNREAD_BYTES wait for it already.
        """
        data = encode_message(message)
        self._check_room(len(data))
        for packet in split_message(data):
            self._outgoing.append((packet, None))
            self._unread += len(packet)
        self._write()

    def post_descriptor(self, descriptor: int) -> None:
        """Send a duplicate of `descriptor` without waiting; the caller keeps its own. Raises as `post` does."""
        self._check_room(0)
        self._outgoing.append((DESCRIPTOR_PACKET, os.dup(descriptor)))
        self._unread += len(DESCRIPTOR_PACKET)
        self._write()

    async def send(self, message: Message) -> None:
        """`post`, then wait until the kernel has everything. Raises as `post` does."""
        self.post(message)
        await self._drain()

    async def send_descriptor(self, descriptor: int) -> None:
        """`post_descriptor`, then wait until the kernel has everything. Raises as `post` does."""
        self.post_descriptor(descriptor)
        await self._drain()

    async def receive(self) -> Message:
        """The next message. Raises PeerLost at the end, TransportError or RecordError for foreign bytes."""
        return await self._inbox.take()

    async def close(self) -> None:
        """End the link, dropping what was posted and not sent. May be called twice."""
        self._end(PeerLost("the link to the member is closed"))

    def _check_room(self, nbytes: int) -> None:
        if self._lost is not None:
            raise self._lost
        if self._unread and self._unread + nbytes > MAX_UNREAD_BYTES:
            raise TransportError(f"process {self.pid} has not read {self._unread} bytes", where=f"process {self.pid}")

    async def _drain(self) -> None:
        while self._outgoing:
            await self._drained.wait()
        if self._lost is not None:
            raise self._lost

    def _start_reading(self) -> None:
        if self._link.fileno() >= 0:
            self._loop.add_reader(self._link.fileno(), self._read)

    def _read(self) -> None:
        try:
            packet = self._link.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, InterruptedError, ConnectionResetError):
            return  # after a reset, what the member sent before it left is still there to be read
        except OSError as error:
            self._end(PeerLost(f"the member is gone: {error.strerror}", where=f"process {self.pid}"))
            return
        if not packet:
            self._end(PeerLost("the member is gone", where=f"process {self.pid}"))
            return
        try:
            got = self._assembler.take(packet)
            if got is not None:
                self._inbox.put(decode_message(got[1]))
        except KeepstepError as error:
            self._end(error)
            return
        if self._inbox.full:
            self._loop.remove_reader(self._link.fileno())

    def _write(self) -> None:
        """Give the kernel what it takes; come back when it takes more."""
        while self._outgoing:
            packet, descriptor = self._outgoing[0]
            try:
                self._link.sendmsg([packet], _rights(descriptor))
            except (BlockingIOError, InterruptedError):
                self._drained.clear()
                self._loop.add_writer(self._link.fileno(), self._write)
                return
            except OSError as error:
                self._stop_writing(PeerLost(f"the member is gone: {error.strerror}", where=f"process {self.pid}"))
                return
            self._outgoing.popleft()
            self._unread -= len(packet)
            if descriptor is not None:
                os.close(descriptor)
        self._loop.remove_writer(self._link.fileno())
        self._drained.set()

    def _stop_writing(self, why: PeerLost) -> None:
        """Nothing can be sent any more; what the member sent before is still read, up to its end."""
        self._lost = self._lost or why
        self._loop.remove_writer(self._link.fileno())
        for _packet, descriptor in self._outgoing:
            if descriptor is not None:
                os.close(descriptor)
        self._outgoing.clear()
        self._drained.set()

    def _end(self, why: KeepstepError) -> None:
        if self._link.fileno() < 0:
            return
        self._stop_writing(why if isinstance(why, PeerLost) else PeerLost(why.what, where=why.where))
        self._inbox.end(why)
        self._loop.remove_reader(self._link.fileno())
        self._link.close()


def _rights(descriptor: int | None) -> list[tuple[int, int, array.array[int]]]:
    if descriptor is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


class WireServer:
    """A listening socket and the tasks of its connections."""

    def __init__(self, name: str, on_connect: Callable[[AgentWire], Awaitable[None]]) -> None:
        self.name = name
        self._on_connect = on_connect
        self._listener = listen_unix(name)
        self._loop = asyncio.get_running_loop()
        self._connections = Connections()
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Stop listening and end all links. May be called twice."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        await self._connections.close()

    def _accept(self) -> None:
        try:
            link, _address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        link.setblocking(False)
        try:
            pid = peer_pid(link)
        except EnvironmentProblem:
            link.close()  # another user: refused without a word
            return
        self._connections.start(self._attend(SocketAgentWire(link, pid=pid)))

    async def _attend(self, wire: SocketAgentWire) -> None:
        try:
            await self._on_connect(wire)
        finally:
            await wire.close()


async def serve(name: str, on_connect: Callable[[AgentWire], Awaitable[None]]) -> WireServer:
    """Listen on the abstract socket `name`; `on_connect` runs as a task for each member that connects.

    The link is closed when `on_connect` returns. PeerLost raised in it is the normal end; any other exception goes
    to the event loop's exception handler. Raises EnvironmentProblem if the name is in use.
    """
    return WireServer(name, on_connect)
