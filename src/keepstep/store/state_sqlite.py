"""The state store in one SQLite file, in WAL mode with full synchronisation."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from keepstep.errors import StoreError
from keepstep.store.state_store import Entry, Lease, check_append, check_entry, next_lease

__all__ = ["SqliteStateStore"]

_BUSY_S = 10.0
_MAX_INDEX = 2**62
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    stream TEXT NOT NULL, position INTEGER NOT NULL, epoch INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (stream, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease (
    only INTEGER PRIMARY KEY CHECK (only = 1), holder TEXT NOT NULL, epoch INTEGER NOT NULL, expires REAL NOT NULL
);
"""


class SqliteStateStore:
    """Safe for several processes of one host. Use it in the thread that made it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StoreError if the file cannot be used or is not a database."""
        self._path = Path(path)
        self._database: sqlite3.Connection | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise self._failure(error) from error
        self._database = database
        try:
            with _alone(self._path.parent):
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=FULL")
                database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise self._failure(error) from error

    def append(self, stream: str, index: int, *, data: bytes, epoch: int) -> None:
        """Add an entry; raises as `StateStore.append` does."""
        check_entry(stream, data)
        with self._transaction() as database:
            row = database.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM entries WHERE stream = ?", (stream,))
            length = row.fetchone()[0]
            check_append(stream, index, length=length, epoch=epoch, granted=_lease(database).epoch)
            database.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (stream, index, epoch, data))

    def read(self, stream: str, from_index: int = 0) -> list[Entry]:
        """The entries from `from_index` on."""
        check_entry(stream, b"")
        with self._transaction(write=False) as database:
            rows = database.execute(
                "SELECT position, epoch, data FROM entries WHERE stream = ? AND position >= ? ORDER BY position",
                (stream, min(from_index, _MAX_INDEX)),
            )
            return [Entry(position, epoch, bytes(data)) for position, epoch, data in rows]

    def lead(self, holder: str, now: float, *, ttl_s: float) -> Lease:
        """Ask to lead; returns the lease that holds now."""
        with self._transaction() as database:
            lease = next_lease(_lease(database), holder, now=now, ttl_s=ttl_s)
            database.execute(
                "INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)", (lease.holder, lease.epoch, lease.expires)
            )
            return lease

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        if self._database is None:
            raise StoreError("the state store is closed", where=str(self._path))
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        return StoreError(
            f"state cannot be kept: {error}",
            where=str(self._path),
            remedy="check that the path is a keepstep state file, that it may be written, and that the disk has space",
        )


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time: SQLite's own waiting does not cover the change to WAL mode of a new file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lease(database: sqlite3.Connection) -> Lease:
    row = database.execute("SELECT holder, epoch, expires FROM lease").fetchone()
    return Lease() if row is None else Lease(*row)
