"""What a state consists of, in order, and its digests: the page that goes ahead of the bytes.

The bytes of a state are cut into chunks of at most CHUNK_BYTES; no chunk spans two entries. Each chunk has an xxh3_64
digest; the digest of the state is the xxh3_128 over all of these, the entries and the packed tree.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from keepstep.errors import TornRecord

__all__ = ["CHUNK_BYTES", "Chunk", "Entry", "Image", "Manifest", "chunk_digests", "decode_manifest", "state_digest"]

CHUNK_BYTES = 1024 * 1024
_PARALLEL_BYTES = 32 * CHUNK_BYTES
_MAX_THREADS = 4


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its place in the state, element type, local shape, bytes, and kind of device."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str = "cpu"


class Manifest(msgspec.Struct, frozen=True):
    """The ordered entries of a state, everything that is no tensor as a packed `tree`, and its `replica` key.

    `extra` holds the small extra objects of the member, `buffers` its own buffers: they may differ between replicas and
    are in no digest.
    """

    entries: tuple[Entry, ...]
    tree: bytes
    replica: str
    extra: bytes = b""
    buffers: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self.entries)

    def chunks(self) -> list[Chunk]:
        """The chunks of all entries, in order."""
        found = []
        for index, entry in enumerate(self.entries):
            for offset in range(0, entry.nbytes, CHUNK_BYTES):
                found.append(Chunk(index, offset, min(CHUNK_BYTES, entry.nbytes - offset)))
        return found

    def encode(self) -> bytes:
        """The manifest as MessagePack."""
        return msgspec.msgpack.encode(self)


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """`length` bytes from `offset` on of entry number `entry`."""

    entry: int
    offset: int
    length: int


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """The manifest in `data`. Raises TornRecord where it is none or contradicts itself."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TornRecord(f"not a state manifest: {error}") from error
    if any(entry.nbytes < 0 for entry in manifest.entries):
        raise TornRecord("a state manifest announces a negative size")
    return manifest


def chunk_digests(buffers: Sequence[memoryview], chunks: Sequence[Chunk]) -> bytes:
    """The xxh3_64 digests (8 bytes each) of `chunks`; large states are read by several threads."""

    def digest_some(some: Sequence[Chunk]) -> bytes:
        one = xxhash.xxh3_64_digest
        return b"".join([one(buffers[c.entry][c.offset : c.offset + c.length]) for c in some])

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    if threads == 1 or sum(len(buffer) for buffer in buffers) < _PARALLEL_BYTES:
        return digest_some(chunks)
    pieces = 4 * threads
    step = max(1, (len(chunks) + pieces - 1) // pieces)
    parts = [chunks[at : at + step] for at in range(0, len(chunks), step)]
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(digest_some, parts))


def state_digest(manifest: Manifest, digests: bytes) -> str:
    """The digest (32 hex digits) of a state with these chunk digests."""
    hasher = xxhash.xxh3_128()
    hasher.update(msgspec.msgpack.encode(manifest.entries))
    hasher.update(manifest.tree)
    hasher.update(digests)
    return hasher.hexdigest()


class Image:
    """A state that stands still: its manifest, views on its bytes, and its digests (computed once, when asked for).

    Valid as long as nobody changes the state; `keep` holds whatever owns the memory of the views.
    """

    def __init__(self, manifest: Manifest, buffers: list[memoryview], *, keep: object = None) -> None:
        self.manifest = manifest
        self.buffers = buffers
        self.chunks = manifest.chunks()
        self._keep = keep
        self._digests: bytes | None = None
        self._lock = threading.Lock()

    @property
    def chunk_digests(self) -> bytes:
        """8 bytes for each chunk."""
        with self._lock:
            if self._digests is None:
                self._digests = chunk_digests(self.buffers, self.chunks)
            return self._digests

    @property
    def digest(self) -> str:
        """The digest of the whole state, 32 hex digits."""
        return state_digest(self.manifest, self.chunk_digests)
