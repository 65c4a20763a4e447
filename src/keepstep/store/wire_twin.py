"""Both ends of a member's link in memory, for tests and for members inside the agent's process."""

from __future__ import annotations

import asyncio
import os
import queue
from collections import deque

from keepstep.errors import PeerLost, TransportError
from keepstep.records.messages import Message, decode_message, encode_message
from keepstep.store.inbox import Inbox

__all__ = ["MemoryAgentWire", "MemoryWire", "wire_pair"]

_LIMIT = 256


class MemoryWire:
    """The member's end; may be used from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: MemoryAgentWire) -> None:
        self._loop = loop
        self._peer = peer
        self._arrived: queue.SimpleQueue[bytes | int | None] = queue.SimpleQueue()
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int] = deque()
        self._gone = False

    def send(self, message: Message) -> None:
        """Send one message; any thread. Raises PeerLost if the agent is gone."""
        data = encode_message(message)
        if self._gone or self._peer.closed:
            raise PeerLost("the agent is gone")
        self._loop.call_soon_threadsafe(self._peer.take, data)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None after `timeout_s` seconds of silence. Raises PeerLost at the end."""
        while not self._messages:
            if not self._pump(timeout_s):
                return None
        return self._messages.popleft()

    def receive_descriptor(self, timeout_s: float | None = None) -> int:
        """The next file descriptor, which the caller closes. Raises PeerLost, and TransportError on time-out."""
        while not self._descriptors:
            if not self._pump(timeout_s):
                raise TransportError(f"no file descriptor came from the agent within {timeout_s} s")
        return self._descriptors.popleft()

    def close(self) -> None:
        """End the link; a `receive` in another thread ends with PeerLost. May be called twice."""
        if not self._gone:
            self._gone = True
            self._arrived.put(None)
            self._loop.call_soon_threadsafe(self._peer.lose)
            while self._descriptors:
                os.close(self._descriptors.popleft())

    def put(self, thing: bytes | int | None) -> None:
        """Called by the other end: message bytes, a descriptor, or None for the end."""
        self._arrived.put(thing)

    def _pump(self, timeout_s: float | None) -> bool:
        if self._gone:
            raise PeerLost("the link to the agent is closed")
        try:
            thing = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if thing is None:
            self._gone = True
            raise PeerLost("the agent is gone")
        if isinstance(thing, int):
            self._descriptors.append(thing)
        else:
            self._messages.append(decode_message(thing))
        return True


class MemoryAgentWire:
    """The agent's end; used inside the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, pid: int) -> None:
        self.pid = pid
        self._inbox: Inbox[Message] = Inbox(limit=_LIMIT)
        self._lost: PeerLost | None = None
        self.other = MemoryWire(loop, self)

    @property
    def closed(self) -> bool:
        """True once the link is closed or the member is gone."""
        return self._lost is not None

    def post(self, message: Message) -> None:
        """Send without waiting. Raises PeerLost if the member is gone."""
        data = encode_message(message)
        if self._lost is not None:
            raise self._lost
        self.other.put(data)

    def post_descriptor(self, descriptor: int) -> None:
        """Send a duplicate of `descriptor` without waiting. Raises PeerLost if the member is gone."""
        if self._lost is not None:
            raise self._lost
        self.other.put(os.dup(descriptor))

    async def send(self, message: Message) -> None:
        """As `post`."""
        self.post(message)

    async def send_descriptor(self, descriptor: int) -> None:
        """As `post_descriptor`."""
        self.post_descriptor(descriptor)

    async def receive(self) -> Message:
        """The next message. Raises PeerLost at the end."""
        return await self._inbox.take()

    async def close(self) -> None:
        """End the link. May be called twice."""
        if self._lost is None:
            self._lost = PeerLost("the link to the member is closed")
            self._inbox.end(self._lost)
            self.other.put(None)

    def take(self, data: bytes) -> None:
        """Called by the other end, in the event loop: message bytes."""
        self._inbox.put(decode_message(data))

    def lose(self) -> None:
        """Called by the other end, in the event loop: the member is gone."""
        if self._lost is None:
            self._lost = PeerLost("the member is gone", where=f"process {self.pid}")
            self._inbox.end(self._lost)


def wire_pair(*, pid: int = 0) -> tuple[MemoryWire, MemoryAgentWire]:
    """Both ends of a link in memory. Call it inside the event loop that will use the agent's end."""
    agent = MemoryAgentWire(asyncio.get_running_loop(), pid=pid)
    return agent.other, agent
