"""One file of a checkpoint: the state or only the private part of one rank, and the page that vouches for it.

`rank-00003.ks`: magic, length of the header, header (MessagePack), then the bytes of all entries in order.
`rank-00003.json`: version, step, world, rank, replica key, holder (the rank whose file has the state), bytes, SHA-256.
A file without its page, or with another hash, does not count.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.errors import TornRecord
from keepstep.training.manifest import Manifest, decode_manifest

__all__ = [
    "FORMAT_VERSION",
    "Header",
    "Page",
    "file_name",
    "page_name",
    "read_header",
    "read_page",
    "sha256_of",
    "write_page",
    "write_shard",
]

FORMAT_VERSION = 1
_MAGIC = b"KSCKPT01"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 * 1024 * 1024
_MAX_PAGE_BYTES = 64 * 1024
_BLOCK = 4 * 1024 * 1024


class Header(msgspec.Struct, frozen=True):
    """What a file holds: the private part of its rank, and the manifest of the state (None: another rank has it)."""

    private: bytes
    manifest: bytes | None = None

    def layout(self) -> Manifest | None:
        """The manifest. Raises TornRecord."""
        return None if self.manifest is None else decode_manifest(self.manifest)


class Page(msgspec.Struct, frozen=True):
    """Vouches for one file."""

    version: int
    step: int
    world: int
    rank: int
    replica: str
    holder: int
    nbytes: int
    sha256: str


def file_name(rank: int) -> str:
    """The file of `rank`."""
    return f"rank-{rank:05d}.ks"


def page_name(rank: int) -> str:
    """The page of `rank`."""
    return f"rank-{rank:05d}.json"


def write_shard(path: Path, header: Header, *, buffers: Sequence[memoryview]) -> tuple[int, str]:
    """Write, sync and rename into place; gives bytes and SHA-256. Raises OSError and leaves no temporary file."""
    packed = msgspec.msgpack.encode(header)
    parts: list[bytes | memoryview] = [_MAGIC, _LENGTH.pack(len(packed)), packed, *buffers]
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    _place(path, parts)
    return sum(len(part) for part in parts), hasher.hexdigest()


def write_page(path: Path, page: Page) -> None:
    """Write, sync and rename into place. Raises OSError."""
    _place(path, [msgspec.json.format(msgspec.json.encode(page), indent=1) + b"\n"])


def read_page(path: Path) -> Page:
    """The page at `path`. Raises TornRecord where it is none or of a newer version, OSError."""
    with path.open("rb") as file:
        data = file.read(_MAX_PAGE_BYTES + 1)
    try:
        page = msgspec.json.decode(data, type=Page)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TornRecord(f"{path.name} is not a checkpoint page: {error}") from error
    if page.version > FORMAT_VERSION:
        raise TornRecord(f"{path.name} has format version {page.version}, this keepstep reads up to {FORMAT_VERSION}")
    return page


def read_header(path: Path) -> tuple[Header, int]:
    """The header of a file, and where its state begins. Raises TornRecord, OSError."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + _LENGTH.size)
        if len(start) != len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
            raise TornRecord(f"{path.name} is not a checkpoint file")
        (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
        if length > _MAX_HEADER_BYTES:
            raise TornRecord(f"{path.name} announces a header of {length} bytes")
        packed = file.read(length)
    try:
        return msgspec.msgpack.decode(packed, type=Header), len(start) + length
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise TornRecord(f"{path.name} is not a checkpoint file: {error}") from error


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    hasher = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def _place(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
