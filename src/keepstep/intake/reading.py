"""What every reader of a foreign format offers: recognise a file by its head, read it into neutral records."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from keepstep.errors import RecordError
from keepstep.records.evidence import Evidence

__all__ = ["HEAD_BYTES", "LONGEST_WHOLE_BYTES", "Reader", "head_of", "opened", "whole"]

HEAD_BYTES = 65_536
"""How much of a file a reader sees to recognise it."""

LONGEST_WHOLE_BYTES = 1 << 30
"""Formats that cannot be streamed are refused above this size (after decompression)."""

_GZIP = b"\x1f\x8b"


class Reader(Protocol):
    """One foreign format. Readers hold no state; `read` is a generator, so that huge files stream."""

    @property
    def name(self) -> str:
        """What people call the format, such as `PyTorch Flight Recorder dump`."""

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether the file looks like this format. `head` is its first HEAD_BYTES, decompressed. Never raises."""

    def read(self, path: Path) -> Iterator[Evidence]:
        """The records of the file, in its order; damage is an `Unread` (and what was readable comes all the same).

        Raises RecordError only if the file is not of this format after all, OSError if it cannot be opened.
        """


def opened(path: Path) -> BinaryIO:
    """The file for reading bytes, decompressed if it is gzip. Raises OSError."""
    file = path.open("rb")
    if file.read(2) == _GZIP:
        file.seek(0)
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    file.seek(0)
    return file


def head_of(path: Path) -> bytes:
    """The first HEAD_BYTES of a file, decompressed; what there is if it is damaged. Raises OSError if not openable."""
    return _bounded(path, HEAD_BYTES)[0]


def whole(path: Path, *, limit: int = LONGEST_WHOLE_BYTES) -> tuple[bytes, bool]:
    """All bytes of a file, decompressed, and whether it was complete (a torn gzip is not).

    Raises RecordError above `limit` bytes and OSError if the file cannot be opened.
    """
    content, complete = _bounded(path, limit + 1)
    if len(content) > limit:
        raise RecordError(f"larger than {limit} bytes", where=str(path), remedy="give the parts of it that matter")
    return content, complete


def _bounded(path: Path, limit: int) -> tuple[bytes, bool]:
    """At most `limit` decompressed bytes, and whether no damage was met on the way."""
    gathered = io.BytesIO()
    with opened(path) as file:
        try:
            while gathered.tell() < limit:
                piece = file.read1(min(1 << 20, limit - gathered.tell()))  # type: ignore[attr-defined]
                if not piece:
                    break
                gathered.write(piece)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return gathered.getvalue(), False
    return gathered.getvalue(), True
