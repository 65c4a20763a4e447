"""The journal of one job: JSON lines that are only ever appended, in `DIR/journal.jsonl`.

One process writes, held by a lock; anybody may read. A record that must survive a crash of the machine before it is
acted upon (a decision) is written with `durable=True`, which waits for the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

import msgspec

from keepstep.errors import StoreError, TornRecord
from keepstep.records.events import Event
from keepstep.records.journal_line import MAX_LINE_BYTES, decode_lines, encode_line
from keepstep.store.disk import disk_error, sync_directory

__all__ = ["JOURNAL_NAME", "AnyJournal", "Journal", "MemoryJournal", "TornTail", "read_journal"]

JOURNAL_NAME = "journal.jsonl"


class TornTail(msgspec.Struct, frozen=True):
    """The end of a journal that a crash cut off: `nbytes` from `offset` on."""

    offset: int
    nbytes: int


class AnyJournal(Protocol):
    """What a writer can do; `Journal` and its in-memory twin both are one."""

    def append(self, event: Event, *, durable: bool = False) -> None:
        """Add one record. Raises StoreError if it cannot be kept."""

    def sync(self) -> None:
        """Make everything appended durable."""

    def replay(self) -> Iterator[Event]:
        """All records from the first."""

    def close(self) -> None:
        """Stop writing. May be called twice."""


class Journal:
    """The journal in a directory, opened for writing. `repaired_bytes` is the torn tail cut off at opening."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.repaired_bytes = 0
        self._descriptor = descriptor
        self._size = 0

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, create: bool = True) -> Journal:
        """Open for writing; a torn last record is cut off.

        Raises StoreError if another process writes this journal, if there is none and `create` is false, or if the
        disk refuses; RecordError if the journal is damaged before its end (nothing is changed then).
        """
        path = Path(directory) / JOURNAL_NAME
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            journal = cls(path, os.open(path, flags, 0o600))
        except OSError as error:
            raise disk_error("cannot open the journal", path, error=error) from error
        try:
            journal._take()
        except BaseException:
            os.close(journal._descriptor)
            raise
        return journal

    def append(self, event: Event, *, durable: bool = False) -> None:
        """Add one record; with `durable` return only when the disk has it and all before it.

        Raises StoreError if it cannot be kept; the journal then ends with the record before it.
        """
        line = encode_line(event)
        self._check_open()
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fdatasync(self._descriptor)
        except OSError as error:
            self._undo()
            raise disk_error("a record cannot be written", self.path, error=error) from error
        self._size += len(line)

    def sync(self) -> None:
        """Make everything appended durable. Raises StoreError."""
        self._check_open()
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise disk_error("the journal cannot be made durable", self.path, error=error) from error

    def replay(self) -> Iterator[Event]:
        """All records from the first, including those appended since. Raises RecordError where it is damaged."""
        with self.path.open("rb") as file:
            yield from decode_lines(_lines(file, self._size), where=str(self.path))

    def close(self) -> None:
        """Stop writing and give up the lock. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self) -> None:
        """Lock the file and cut off a torn tail."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                "another process writes this journal",
                where=str(self.path),
                remedy="wait until it has ended, or use another directory",
            ) from error
        torn = _scan(self.path, lambda event: None)
        self._size = os.fstat(self._descriptor).st_size
        if torn is not None:
            self.repaired_bytes = torn.nbytes
            self._size = torn.offset
            os.ftruncate(self._descriptor, torn.offset)
        os.fsync(self._descriptor)
        sync_directory(self.path.parent)

    def _undo(self) -> None:
        """Take back a half-written record, as far as the disk lets us; the next opening repairs the rest."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StoreError("the journal is closed", where=str(self.path))


class MemoryJournal:
    """The journal in memory: the same lines, no disk."""

    def __init__(self) -> None:
        self.repaired_bytes = 0
        self._lines: list[bytes] = []
        self._open = True

    def append(self, event: Event, *, durable: bool = False) -> None:
        """Add one record. Raises StoreError after `close`."""
        line = encode_line(event)
        if not self._open:
            raise StoreError("the journal is closed")
        self._lines.append(line)

    def sync(self) -> None:
        """Nothing to do."""

    def replay(self) -> Iterator[Event]:
        """All records from the first."""
        yield from decode_lines(list(self._lines))

    def close(self) -> None:
        """Stop writing. May be called twice."""
        self._open = False


def read_journal(directory: str | os.PathLike[str]) -> tuple[tuple[Event, ...], TornTail | None]:
    """The records of the journal in `directory` and its torn tail, for readers: no lock, nothing is changed.

    Raises StoreError if there is no journal, RecordError if it is damaged before its end.
    """
    path = Path(directory) / JOURNAL_NAME
    events: list[Event] = []
    try:
        torn = _scan(path, events.append)
    except OSError as error:
        raise disk_error("cannot read the journal", path, error=error) from error
    return tuple(events), torn


def _scan(path: Path, take: Callable[[Event], object]) -> TornTail | None:
    """Give all whole records to `take`; the torn tail, if there is one."""
    with path.open("rb") as file:
        last = _LastLine(file)
        try:
            for event in decode_lines(last, where=str(path)):
                take(event)
        except TornRecord:
            return TornTail(offset=last.offset, nbytes=os.fstat(file.fileno()).st_size - last.offset)
    return None


class _LastLine:
    """The lines of a file; `offset` is where the last one given out begins."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.offset = 0

    def __iter__(self) -> Iterator[bytes]:
        here = 0
        for line in _lines(self._file, None):
            self.offset, here = here, here + len(line)
            yield line


def _lines(file: IO[bytes], limit: int | None) -> Iterator[bytes]:
    """The lines of `file` up to byte `limit`, none longer than one byte over the longest that is allowed."""
    taken = 0
    while limit is None or taken < limit:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        taken += len(line)
        yield line
