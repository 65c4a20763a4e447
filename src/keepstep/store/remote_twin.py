"""Controller and agent in one process: both ends of their link in memory."""

from __future__ import annotations

from keepstep.errors import PeerLost
from keepstep.store.inbox import Inbox
from keepstep.store.remote_peer import Envelope, decode_envelope, encode_envelope

__all__ = ["MemoryPeer", "remote_pair"]

_LIMIT = 1024


class MemoryPeer:
    """One end; envelopes go through their encoding, so both sides see what a socket would give."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._inbox: Inbox[Envelope] = Inbox(limit=_LIMIT)
        self._other: MemoryPeer | None = None

    @property
    def closed(self) -> bool:
        """True once either side closed the link."""
        return self._other is None

    def join(self, other: MemoryPeer) -> None:
        """Make `other` the other end."""
        self._other = other

    def post(self, envelope: Envelope) -> None:
        """Send without waiting. Raises PeerLost if the link is closed."""
        data = encode_envelope(envelope)
        if self._other is None:
            raise PeerLost("the link is closed", where=self.where)
        self._other.put(data)

    def put(self, data: bytes) -> None:
        """Called by the other end: one envelope."""
        self._inbox.put(decode_envelope(data))

    async def send(self, envelope: Envelope) -> None:
        """As `post`."""
        self.post(envelope)

    async def receive(self) -> Envelope:
        """The next envelope. Raises PeerLost at the end."""
        return await self._inbox.take()

    async def answers(self, timeout_s: float) -> bool:
        """Whether the link stands."""
        return not self.closed

    async def close(self) -> None:
        """End the link on both sides. May be called twice."""
        self.lose()

    def lose(self) -> None:
        """The link ended: the other end calls it too."""
        other, self._other = self._other, None
        self._inbox.end(PeerLost("the other side is gone", where=self.where))
        if other is not None:
            other.lose()


def remote_pair() -> tuple[MemoryPeer, MemoryPeer]:
    """(the controller's end, the agent's end). Call it inside the event loop."""
    controller, agent = MemoryPeer("the agent in this process"), MemoryPeer("the controller in this process")
    controller.join(agent)
    agent.join(controller)
    return controller, agent
