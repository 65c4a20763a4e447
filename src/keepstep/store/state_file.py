"""The state store in a directory: one file for each stream, one for the lease, one lock for all.

An entry is a header of 32 bytes (little endian: u32 magic 0x4553534B, u32 length, u64 index, u64 epoch, u32 crc32 of
the data, u32 crc32 of the header before it) and the data. Every entry is on the disk before `append` returns, so a
crash can tear only the last one; it is cut off by the next append. Anything else that is wrong is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.errors import StoreError, TornRecord
from keepstep.store.disk import disk_error, sync_directory
from keepstep.store.state_store import MAX_ENTRY_BYTES, Entry, Lease, check_append, check_entry, next_lease

__all__ = ["FileStateStore"]

_HEADER = struct.Struct("<IIQQII")
_MAGIC = 0x4553534B


class FileStateStore:
    """Safe for several processes of one host that share the directory (and for NFS with locks)."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises StoreError if the directory cannot be used."""
        self._directory = Path(directory)
        self._known: dict[str, tuple[int, int]] = {}  # for each stream: whole entries, and the offset behind them
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            sync_directory(self._directory)
        except OSError as error:
            raise disk_error("cannot use the state directory", self._directory, error=error) from error

    def append(self, stream: str, index: int, *, data: bytes, epoch: int) -> None:
        """Add an entry; raises as `StateStore.append` does, and TornRecord if the stream is damaged."""
        check_entry(stream, data)
        with self._locked(fcntl.LOCK_EX):
            path = self._path(stream)
            new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                length, offset = self._catch_up(stream, descriptor)
                check_append(stream, index, length=length, epoch=epoch, granted=self._read_lease().epoch)
                _write_at(descriptor, offset, data=_pack(Entry(index, epoch, data)))
            finally:
                os.close(descriptor)
            if new:
                sync_directory(self._directory)
            self._known[stream] = (index + 1, offset + _HEADER.size + len(data))

    def read(self, stream: str, from_index: int = 0) -> list[Entry]:
        """The entries from `from_index` on. Raises TornRecord if the stream is damaged."""
        check_entry(stream, b"")
        with self._locked(fcntl.LOCK_SH):
            path = self._path(stream)
            if not path.exists():
                return []
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                entries = _entries(descriptor, first=0, offset=0, where=str(path))
                return [entry for entry, _end in entries if entry.index >= from_index]
            finally:
                os.close(descriptor)

    def lead(self, holder: str, now: float, *, ttl_s: float) -> Lease:
        """Ask to lead; returns the lease that holds now."""
        with self._locked(fcntl.LOCK_EX):
            old = self._read_lease()
            lease = next_lease(old, holder, now=now, ttl_s=ttl_s)
            if lease != old:
                self._write_lease(lease)
            return lease

    def close(self) -> None:
        """Let go of the lock file. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        if self._lock < 0:
            raise StoreError("the state store is closed", where=str(self._directory))
        try:
            fcntl.flock(self._lock, how)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError as error:
            raise disk_error("state cannot be kept", self._directory, error=error) from error

    def _path(self, stream: str) -> Path:
        return self._directory / (stream.replace("/", "+") + ".stream")

    def _catch_up(self, stream: str, descriptor: int) -> tuple[int, int]:
        """(entries, offset behind them), reading only what was added since the last look."""
        length, offset = self._known.get(stream, (0, 0))
        if os.fstat(descriptor).st_size < offset:
            length, offset = 0, 0
        for _entry, end in _entries(descriptor, first=length, offset=offset, where=stream):
            length, offset = length + 1, end
        self._known[stream] = (length, offset)
        return length, offset

    def _read_lease(self) -> Lease:
        path = self._directory / "lease.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Lease)
        except FileNotFoundError:
            return Lease()
        except msgspec.DecodeError as error:
            raise TornRecord(f"the lease is damaged: {error}", where=str(path)) from error

    def _write_lease(self, lease: Lease) -> None:
        fresh = self._directory / "lease.new"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_at(descriptor, 0, data=msgspec.json.encode(lease))
        finally:
            os.close(descriptor)
        fresh.rename(self._directory / "lease.json")
        sync_directory(self._directory)


def _pack(entry: Entry) -> bytes:
    checked = struct.pack("<IIQQI", _MAGIC, len(entry.data), entry.index, entry.epoch, zlib.crc32(entry.data))
    return checked + struct.pack("<I", zlib.crc32(checked)) + entry.data


def _write_at(descriptor: int, offset: int, *, data: bytes) -> None:
    """Make the file end with `data` at `offset`, on the disk; on an error it ends before."""
    os.ftruncate(descriptor, offset)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.pwrite(descriptor, rest, offset + len(data) - len(rest)) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, offset)
        raise


def _entries(descriptor: int, *, first: int, offset: int, where: str) -> Iterator[tuple[Entry, int]]:
    """(entry, offset behind it) from `offset` on, up to the end or a torn last entry. Raises TornRecord for damage."""
    size = os.fstat(descriptor).st_size
    while offset < size:
        header = os.pread(descriptor, _HEADER.size, offset)
        if len(header) < _HEADER.size:
            return
        magic, length, index, epoch, checksum, header_checksum = _HEADER.unpack(header)
        if magic != _MAGIC or zlib.crc32(header[:-4]) != header_checksum or index != first or length > MAX_ENTRY_BYTES:
            if not any(os.pread(descriptor, size - offset, offset)):
                return  # zeros: the file grew before the crash, its bytes did not arrive
            raise TornRecord(f"entry {first} is damaged", where=where, remedy="restore this file from a copy")
        end = offset + _HEADER.size + length
        data = os.pread(descriptor, length, offset + _HEADER.size)
        if len(data) < length or zlib.crc32(data) != checksum:
            if end >= size:
                return
            raise TornRecord(f"entry {first} is damaged", where=where, remedy="restore this file from a copy")
        yield Entry(index, epoch, data), end
        first, offset = first + 1, end
