"""Tensors and values as `torch.distributed.checkpoint` keeps them in a file: each item is what `torch.save` writes.

A tensor is a zip archive that is not compressed, so its bytes lie in the file as they are; where they begin is noted,
and keepstep reads them from there without unpickling anything. The file is hashed (SHA-256) while it is written.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import IO, Any

import msgspec
import torch
import xxhash

__all__ = ["ItemPlace", "Sink", "write_tensor", "write_value"]

_PIECE = 4 * 1024 * 1024
_DATE = (1980, 1, 1, 0, 0, 0)


class ItemPlace(msgspec.Struct, frozen=True, array_like=True):
    """One item of a data file: `offset` and `length` of the archive.

    Of a tensor also `start` of its bytes (-1: no tensor) and their `digest` (XXH3; empty in older files).
    """

    offset: int
    length: int
    start: int = -1
    digest: str = ""


class Sink:
    """A file that is only appended to; knows its length and its hash."""

    def __init__(self, file: IO[bytes]) -> None:
        self.nbytes = 0
        self._file = file
        self._hasher = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Append. Raises OSError."""
        self._hasher.update(data)
        self._file.write(data)
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""

    @property
    def sha256(self) -> str:
        """Of everything so far."""
        return self._hasher.hexdigest()


class _Records:
    """Takes the place of torch's zip writer: keeps the records of one tensor, its storage by reference."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any]] = []

    def write_record(self, name: str, *record: Any) -> None:
        """One file of the archive: its name, its data and their size."""
        self.records.append((name, record[0]))


def write_tensor(sink: Sink, tensor: torch.Tensor, *, data: memoryview) -> ItemPlace:
    """Append `tensor`, whose bytes are `data` (contiguous, in host memory). Raises OSError."""
    offset, start, hasher = sink.nbytes, -1, xxhash.xxh3_128()
    records = _Records()
    torch.serialization._save(tensor, records, torch.serialization.pickle, 2, False)
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        for name, record in records.records:
            info = zipfile.ZipInfo(f"archive/{name}", _DATE)
            if not name.startswith("data/"):
                archive.writestr(info, record)
                continue
            info.file_size = len(data)
            with archive.open(info, "w") as out:
                start = sink.nbytes
                for piece in range(0, len(data), _PIECE):
                    out.write(data[piece : piece + _PIECE])
                    hasher.update(data[piece : piece + _PIECE])
        archive.writestr(zipfile.ZipInfo("archive/version", _DATE), "3\n")
    return ItemPlace(offset, sink.nbytes - offset, start, hasher.hexdigest())


def write_value(sink: Sink, value: object) -> ItemPlace:
    """Append a plain value (numbers, strings, lists, ...). Raises OSError."""
    offset = sink.nbytes
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sink.write(buffer.getvalue())
    return ItemPlace(offset, sink.nbytes - offset)
