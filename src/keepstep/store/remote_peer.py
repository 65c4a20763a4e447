"""What controller and agent say to each other, and the end of such a link that both have."""

from __future__ import annotations

from typing import Protocol

import msgspec

from keepstep.errors import RecordError
from keepstep.records.messages import MAX_MESSAGE_BYTES, Message

__all__ = ["MAX_ENVELOPE_BYTES", "Envelope", "RemotePeer", "decode_envelope", "encode_envelope"]

MAX_ENVELOPE_BYTES = MAX_MESSAGE_BYTES + 4096
"""Longest envelope, encoded."""


class Envelope(msgspec.Struct, frozen=True):
    """A message with the `node` it is from or to, and the `member` there ("": the agent itself).

    `number` counts the orders to a node, and its facts that change something, from 1 on over all links between the
    two, so that after a new link nothing is lost or heard twice; 0: it does not matter if this one is lost.
    """

    node: str
    member: str
    message: Message
    number: int = 0


class RemotePeer(Protocol):
    """One end of a link between controller and agent."""

    @property
    def where(self) -> str:
        """The other side, in words."""

    @property
    def closed(self) -> bool:
        """True once the link is closed or the other side is gone."""

    def post(self, envelope: Envelope) -> None:
        """Send without waiting. Raises PeerLost if gone and TransportError if too much is unread."""

    async def send(self, envelope: Envelope) -> None:
        """`post`, then wait until it has left this process."""

    async def receive(self) -> Envelope:
        """The next envelope. Raises PeerLost at the end. Cancelling it loses nothing."""

    async def answers(self, timeout_s: float) -> bool:
        """Whether the other side gives a sign of life within so many seconds."""

    async def close(self) -> None:
        """End the link after sending what was posted. May be called twice."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """`envelope` as MessagePack. Raises RecordError if it is over MAX_ENVELOPE_BYTES."""
    data = _encoder.encode(envelope)
    if len(data) > MAX_ENVELOPE_BYTES:
        raise RecordError(f"an envelope of {len(data)} bytes, at most {MAX_ENVELOPE_BYTES} are allowed")
    return data


def decode_envelope(data: bytes) -> Envelope:
    """The envelope in `data`. Raises RecordError for anything that is not one."""
    if len(data) > MAX_ENVELOPE_BYTES:
        raise RecordError(f"an envelope of {len(data)} bytes, at most {MAX_ENVELOPE_BYTES} are allowed")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"not a keepstep envelope: {error}") from error
