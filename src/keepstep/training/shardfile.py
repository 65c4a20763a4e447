"""The files of one rank in a checkpoint, and the page that vouches for them.

`__3_0.distcp`: the state as `torch.distributed.checkpoint` keeps it (none where another rank has the state).
`rank-00003.ks`: magic, length of the header, header (MessagePack): the private part, and where in the data what lies.
`rank-00003.json`: version, step, world, rank, replica key, holder (the rank that has the state), bytes and SHA-256
of both, and in which job and generation it was written. A file without its page, or with another hash, does not count.

In version 1 (read, not written any more) the bytes of all entries followed the header in the `.ks` file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import torch

from keepstep.errors import TornRecord
from keepstep.training.buckets import KeptBuckets
from keepstep.training.dcp_items import ItemPlace, Sink, write_tensor, write_value
from keepstep.training.dcp_metadata import Contents
from keepstep.training.dcp_names import Described, Value
from keepstep.training.manifest import Entry, Manifest, decode_manifest

__all__ = [
    "FORMAT_VERSION",
    "Header",
    "Page",
    "data_name",
    "file_name",
    "page_name",
    "read_header",
    "read_page",
    "sha256_of",
    "write_data",
    "write_header",
    "write_page",
]

FORMAT_VERSION = 2
_MAGIC = b"KSCKPT01"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 * 1024 * 1024
_MAX_PAGE_BYTES = 64 * 1024
_BLOCK = 4 * 1024 * 1024


class Header(msgspec.Struct, frozen=True):
    """What a file holds: the private part of its rank, and the manifest of the state (None: another rank has it).

    `contents` says where in the data file everything lies (None: right behind this header, version 1), `buckets` are
    the gradient buckets of this rank's DDP modules.
    """

    private: bytes
    manifest: bytes | None = None
    contents: Contents | None = None
    buckets: tuple[KeptBuckets, ...] = ()

    def layout(self) -> Manifest | None:
        """The manifest. Raises TornRecord."""
        return None if self.manifest is None else decode_manifest(self.manifest)


class Page(msgspec.Struct, frozen=True):
    """Vouches for the files of one rank.

    `written_in` names the job and its generation (empty: by an earlier version): parts that differ in it are of two
    courses of training.
    """

    version: int
    step: int
    world: int
    rank: int
    replica: str
    holder: int
    nbytes: int
    sha256: str
    data_nbytes: int = 0
    data_sha256: str = ""
    written_in: str = ""


def data_name(rank: int) -> str:
    """The data file of `rank`."""
    return f"__{rank}_0.distcp"


def file_name(rank: int) -> str:
    """The file of `rank`."""
    return f"rank-{rank:05d}.ks"


def page_name(rank: int) -> str:
    """The page of `rank`."""
    return f"rank-{rank:05d}.json"


def write_header(path: Path, header: Header) -> tuple[int, str]:
    """Write, sync and rename into place; gives bytes and SHA-256. Raises OSError and leaves no temporary file."""
    packed = msgspec.msgpack.encode(header)
    data = b"".join((_MAGIC, _LENGTH.pack(len(packed)), packed))
    with _placing(path) as file:
        file.write(data)
    return len(data), hashlib.sha256(data).hexdigest()


def write_data(
    path: Path, manifest: Manifest, *, buffers: Sequence[memoryview], described: Described
) -> tuple[Contents, Sink]:
    """Write the state as DCP keeps it, sync and rename into place. Raises OSError and leaves no temporary file."""
    places: list[ItemPlace] = []
    values: list[Value] = []
    value_places: list[ItemPlace] = []
    with _placing(path) as file:
        sink = Sink(file)
        for entry, buffer in zip(manifest.entries, buffers, strict=True):
            places.append(write_tensor(sink, _tensor_of(entry, buffer), data=buffer))
        for value, content in described.values:
            values.append(value)
            value_places.append(write_value(sink, content))
    dtypes, shapes = [entry.dtype for entry in manifest.entries], [entry.shape for entry in manifest.entries]
    parts = [described.parts[entry.name] for entry in manifest.entries]
    return Contents(path.name, dtypes, shapes, parts, places, values, value_places), sink


def _tensor_of(entry: Entry, buffer: memoryview) -> torch.Tensor:
    """A tensor over `buffer`, without a copy."""
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(entry.shape)


def write_page(path: Path, page: Page) -> None:
    """Write, sync and rename into place. Raises OSError."""
    with _placing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(page), indent=1) + b"\n")


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


@contextlib.contextmanager
def _placing(path: Path) -> Iterator[IO[bytes]]:
    """A file that comes to `path` whole, synced, when the block ends, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
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
