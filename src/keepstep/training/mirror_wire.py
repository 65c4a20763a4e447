"""How a copy of a state goes to the member that holds it, and back: over authenticated stream sockets.

There: an offer (MessagePack behind its length), the answer (status), then for every unit of chunks their XXH3 digests
and their bytes; at the end the receiver says the digest of the whole. Back: rank and version, the private part behind
its length, and then the questions and answers of `statewire`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from keepstep.errors import PeerLost, TornRecord
from keepstep.training.host_memory import Block
from keepstep.training.manifest import Chunk, Manifest, decode_manifest, state_digest
from keepstep.training.shelf import KeptState
from keepstep.training.statewire import MAX_MANIFEST_BYTES, Status, receive_exactly, receive_into

__all__ = [
    "MAX_PRIVATE",
    "STALL_S",
    "Offer",
    "ask_copy",
    "read_copy_request",
    "receive_state",
    "send_private_of",
    "send_state",
]

MAX_PRIVATE = 1024 * 1024
STALL_S = 30.0
"""A peer that moves no byte for so long in the middle of a copy is given up."""
_LENGTH = struct.Struct("<I")
_ASKED = struct.Struct("<4sIQ")
_MAGIC = b"KSMC"
_NONE = 0xFFFFFFFF
_UNIT_BYTES = 1024 * 1024
_UNIT_CHUNKS = 1024


class Offer(msgspec.Struct, frozen=True):
    """What is going to be sent."""

    rank: int
    version: int
    generation: int
    manifest: bytes
    private: bytes


def _units(chunks: list[Chunk]) -> Iterator[tuple[list[Chunk], int]]:
    """Runs of chunks of about _UNIT_BYTES, and how many bytes each has."""
    run: list[Chunk] = []
    nbytes = 0
    for chunk in chunks:
        run.append(chunk)
        nbytes += chunk.length
        if nbytes >= _UNIT_BYTES or len(run) == _UNIT_CHUNKS:
            yield run, nbytes
            run, nbytes = [], 0
    if run:
        yield run, nbytes


def _digests(view: memoryview, run: list[Chunk]) -> bytes:
    found, at = [], 0
    for chunk in run:
        found.append(xxhash.xxh3_64_digest(view[at : at + chunk.length]))
        at += chunk.length
    return b"".join(found)


def send_state(sock: socket.socket, offer: Offer, *, block: Block, gap: Callable[[], None]) -> str:
    """Send one copy and return its digest, which the receiver has confirmed; `gap` is called before every unit.

    Raises PeerLost where the receiver does not want it or got something else, OSError.
    """
    data = msgspec.msgpack.encode(offer)
    sock.sendall(_LENGTH.pack(len(data)) + data)
    (status,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if status != Status.OK:
        raise PeerLost("the holder of the mirror does not take it now")
    manifest = decode_manifest(offer.manifest)
    all_digests, at = [], 0
    for run, nbytes in _units(manifest.chunks()):
        gap()
        view = block.view[at : at + nbytes]
        digests = _digests(view, run)
        sock.sendall(digests)
        sock.sendall(view)
        all_digests.append(digests)
        at += nbytes
    digest = state_digest(manifest, b"".join(all_digests))
    if bytes(receive_exactly(sock, 32)) != digest.encode():
        raise PeerLost("the holder of the mirror has other bytes than were sent")
    return digest


def receive_state(
    sock: socket.socket, *, admit: Callable[[Offer, Manifest], Block | None], settle: Callable[[KeptState], bool]
) -> bool:
    """Receive one copy into the block that `admit` gives (None: refused) and hand it to `settle` (False: refused).

    False when the sender has hung up. Raises PeerLost, TornRecord, OSError; the block is then not complete.
    """
    start = bytearray(_LENGTH.size)
    if sock.recv_into(start, len(start), socket.MSG_WAITALL) < len(start):
        return False
    (length,) = _LENGTH.unpack(start)
    if length > MAX_MANIFEST_BYTES:
        raise TornRecord(f"a mirror announces {length} bytes of manifest")
    try:
        offer = msgspec.msgpack.decode(receive_exactly(sock, length), type=Offer)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TornRecord(f"not the offer of a mirror: {error}") from error
    manifest = decode_manifest(offer.manifest)
    block = admit(offer, manifest)
    if block is None:
        sock.sendall(_LENGTH.pack(Status.REFUSED))
        return True
    sock.sendall(_LENGTH.pack(Status.OK))
    digest = _receive_units(sock, manifest, block=block)
    if not settle(KeptState(offer.rank, offer.version, offer.generation, manifest, digest, offer.private, block)):
        raise PeerLost("a mirror came when it was not wanted any more")
    sock.sendall(digest.encode())
    return True


def _receive_units(sock: socket.socket, manifest: Manifest, *, block: Block) -> str:
    """Fill `block`; gives the digest of the whole. Raises TornRecord where a chunk is not what its digest says."""
    all_digests, at = [], 0
    for run, nbytes in _units(manifest.chunks()):
        digests = bytes(receive_exactly(sock, 8 * len(run)))
        view = block.view[at : at + nbytes]
        receive_into(sock, [view])
        if _digests(view, run) != digests:
            raise TornRecord("a chunk of a mirror is damaged")
        all_digests.append(digests)
        at += nbytes
    return state_digest(manifest, b"".join(all_digests))


# ---------------------------------------------------------------- back


def ask_copy(sock: socket.socket, rank: int, *, version: int) -> bytes:
    """Ask for the copy of `rank`; gives its private part. Raises PeerLost where there is none (any more), OSError."""
    sock.sendall(_ASKED.pack(_MAGIC, rank, version))
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if length > MAX_PRIVATE:
        raise PeerLost(f"the mirror of rank {rank}, version {version}, is not there")
    return bytes(receive_exactly(sock, length))


def read_copy_request(sock: socket.socket) -> tuple[int, int]:
    """Rank and version that a joiner asks for. Raises PeerLost, TornRecord, OSError."""
    magic, rank, version = _ASKED.unpack(receive_exactly(sock, _ASKED.size))
    if magic != _MAGIC:
        raise TornRecord("not a request for a mirror")
    return rank, version


def send_private_of(sock: socket.socket, kept: KeptState | None) -> None:
    """Answer a joiner with the private part of what it wants, or that it is not there. Raises OSError."""
    sock.sendall(_LENGTH.pack(_NONE) if kept is None else _LENGTH.pack(len(kept.private)) + kept.private)
