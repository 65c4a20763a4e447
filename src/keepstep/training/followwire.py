"""What a leaver tells the joiner that follows it: one stream of frames, and how they travel.

A frame is a head (magic, bytes of the description, bytes of the payload), a MessagePack description and the
payload. Everything is bounded: a description by the largest manifest, a payload by what its description says.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from keepstep.errors import TornRecord
from keepstep.training.buckets import Bucketing
from keepstep.training.manifest import Manifest, decode_manifest
from keepstep.training.statewire import MAX_MANIFEST_BYTES, receive_exactly
from keepstep.training.updates import room

__all__ = [
    "PIECE_BYTES",
    "Description",
    "FinalDigest",
    "Follow",
    "HandedOver",
    "NothingToFollow",
    "SnapshotHead",
    "UpdateHead",
    "receive_frame",
    "send_frame",
    "wrong_chunk",
]

PIECE_BYTES = 512 * 1024
"""State goes out in pieces of this size, each in a gap between collectives where there is one."""

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"KSFW"


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Joiner to leaver, first of all: I am the joiner of move `number`."""

    number: int


class NothingToFollow(msgspec.Struct, frozen=True, tag=True):
    """There will be no updates, because of `why`; what differs at the end is copied then."""

    why: str


class SnapshotHead(msgspec.Struct, frozen=True, tag=True):
    """The whole state of `version`; `digests` has 8 bytes for each chunk. The payload is all entries in order.

    `behind` counts the frames that already wait behind this one.
    """

    version: int
    manifest: bytes
    digests: bytes
    behind: int


class UpdateHead(msgspec.Struct, frozen=True, tag=True):
    """The update that makes `version` of the version before: `groups` are the optimizer's hyper-parameters, `sizes` the
    bytes of each gradient, `digest` (xxh3_64) that of the payload, which holds them; `behind` as in `SnapshotHead`.
    Without `groups` the step counted and updated nothing."""

    version: int
    groups: bytes
    sizes: tuple[int, ...]
    digest: bytes
    behind: int


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """The move is committed in `generation` with the state of `version`. `private` is the rank's own state, `replicas`
    says what each rank holds, `vote_s` how long the vote took, `buckets` those of each DDP module."""

    number: int
    generation: int
    version: int
    private: bytes
    replicas: dict[int, str]
    vote_s: float
    buckets: tuple[Bucketing, ...] = ()


class FinalDigest(msgspec.Struct, frozen=True, tag=True):
    """The digest of the state that was handed over."""

    digest: str


Description = Follow | NothingToFollow | SnapshotHead | UpdateHead | HandedOver | FinalDigest
"""What a frame says."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def send_frame(
    sock: socket.socket,
    description: Description,
    *,
    payload: Sequence[memoryview] = (),
    before_piece: Callable[[], None] | None = None,
) -> None:
    """Send one frame; `before_piece` is called before each piece of the payload. Raises OSError."""
    said = _encoder.encode(description)
    sock.sendall(_HEAD.pack(_MAGIC, len(said), sum(len(part) for part in payload)) + said)
    for part in payload:
        for at in range(0, len(part), PIECE_BYTES):
            if before_piece is not None:
                before_piece()
            sock.sendall(part[at : at + PIECE_BYTES])


def receive_frame(sock: socket.socket, *, most: int) -> tuple[Description, int]:
    """The next description and how many bytes of payload follow it, at most `most` for an update.

    Raises PeerLost, TornRecord, OSError.
    """
    magic, said, nbytes = _HEAD.unpack(receive_exactly(sock, _HEAD.size))
    if magic != _MAGIC or said > MAX_MANIFEST_BYTES:
        raise TornRecord("not a frame of a leaver")
    try:
        description = _decoder.decode(receive_exactly(sock, said))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TornRecord(f"not a frame of a leaver: {error}") from error
    if nbytes != _announced(description, most):
        raise TornRecord(f"{nbytes} bytes come with a {type(description).__name__}")
    return description, nbytes


def _announced(description: Description, most: int) -> int:
    if isinstance(description, SnapshotHead):
        return decode_manifest(description.manifest).nbytes
    if isinstance(description, UpdateHead):
        needed = room(description.sizes)
        if needed > most:
            raise TornRecord(f"an update of {needed} bytes, at most {most} fit this member")
        return needed
    return 0


def wrong_chunk(manifest: Manifest, digests: bytes, *, views: Sequence[memoryview]) -> str:
    """The name of the first entry whose bytes are not those of `digests`; empty if all are right."""
    one = xxhash.xxh3_64_digest
    for number, chunk in enumerate(manifest.chunks()):
        part = views[chunk.entry][chunk.offset : chunk.offset + chunk.length]
        if one(part) != digests[8 * number : 8 * number + 8]:
            return manifest.entries[chunk.entry].name
    return ""
