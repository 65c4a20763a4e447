"""Where controllers keep what must outlive them: streams of entries that are only appended, and who leads.

Streams are `cluster/NAME` and `job/ID/NAME` (NAME may be empty). A writer names the index its entry must get, so
that of two writers one fails, and the epoch it leads in, so that a deposed leader fails. Epochs only grow.
"""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from keepstep.errors import AppendConflict, StaleEpoch, StoreError, UsageError

__all__ = [
    "MAX_ENTRY_BYTES",
    "Entry",
    "Lease",
    "MemoryStateStore",
    "StateStore",
    "check_append",
    "check_entry",
    "next_lease",
]

MAX_ENTRY_BYTES = 8 * 1024 * 1024

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_STREAM = re.compile(rf"(cluster|job/{_NAME})/({_NAME})?\Z", re.ASCII)


class Entry(msgspec.Struct, frozen=True):
    """One entry of a stream, written in `epoch`."""

    index: int
    epoch: int
    data: bytes


class Lease(msgspec.Struct, frozen=True):
    """`holder` leads in `epoch` until `expires` (the caller's clock, s). No holder and epoch 0: nobody led yet."""

    holder: str = ""
    epoch: int = 0
    expires: float = 0.0


class StateStore(Protocol):
    """What every engine does; each passes the same tests."""

    def append(self, stream: str, index: int, *, data: bytes, epoch: int) -> None:
        """Add an entry, durable on return.

        Raises AppendConflict unless `index` is the number of entries there, StaleEpoch if `epoch` is below the
        newest one that was granted, StoreError if it is above it or cannot be kept, UsageError for a bad stream.
        """

    def read(self, stream: str, from_index: int = 0) -> list[Entry]:
        """The entries from `from_index` on; an unknown stream is empty."""

    def lead(self, holder: str, now: float, *, ttl_s: float) -> Lease:
        """Ask to lead until `now + ttl_s`; the lease that holds now is returned: compare its holder.

        The holder of a valid lease renews it in the same epoch; a free or expired lease is granted in a new one.
        """

    def close(self) -> None:
        """Let go of files. May be called twice."""


def check_append(stream: str, index: int, *, length: int, epoch: int, granted: int) -> None:
    """Raise what `append` must raise for a stream with `length` entries where `granted` is the newest epoch."""
    if epoch < granted:
        raise StaleEpoch(
            f"a write of epoch {epoch}, epoch {granted} leads now", where=stream, remedy="stop: another one took over"
        )
    if epoch > granted:
        raise StoreError(f"a write of epoch {epoch}, which was never granted", where=stream, remedy="call lead() first")
    if index != length:
        raise AppendConflict(
            f"entry {index} cannot be added, the stream has {length}", where=stream, remedy="read again, then retry"
        )


def check_entry(stream: str, data: bytes) -> None:
    """Raise UsageError for a name that is no stream, StoreError for an entry over MAX_ENTRY_BYTES."""
    if _STREAM.match(stream) is None:
        raise UsageError(f"{stream[:100]!r} is not a stream", remedy="use cluster/NAME or job/ID/NAME")
    if len(data) > MAX_ENTRY_BYTES:
        raise StoreError(f"an entry of {len(data)} bytes, at most {MAX_ENTRY_BYTES} are allowed", where=stream)


def next_lease(lease: Lease, holder: str, *, now: float, ttl_s: float) -> Lease:
    """The lease after `holder` asked for it at `now`. Raises UsageError for an empty holder or a ttl not above 0."""
    if not holder or len(holder) > 256 or not ttl_s > 0:
        raise UsageError("a leader needs a name of 1 to 256 characters and a time-out above 0 s")
    if now < lease.expires:
        if holder != lease.holder:
            return lease
        return Lease(holder, lease.epoch, max(lease.expires, now + ttl_s))
    return Lease(holder, lease.epoch + 1, now + ttl_s)


class MemoryStateStore:
    """The store in memory; several users in one process may share it."""

    def __init__(self) -> None:
        self._streams: dict[str, list[Entry]] = {}
        self._lease = Lease()

    def append(self, stream: str, index: int, *, data: bytes, epoch: int) -> None:
        """Add an entry; raises as `StateStore.append` does."""
        check_entry(stream, data)
        length = len(self._streams.get(stream, ()))
        check_append(stream, index, length=length, epoch=epoch, granted=self._lease.epoch)
        self._streams.setdefault(stream, []).append(Entry(index, epoch, data))

    def read(self, stream: str, from_index: int = 0) -> list[Entry]:
        """The entries from `from_index` on."""
        check_entry(stream, b"")
        return self._streams.get(stream, [])[max(from_index, 0) :]

    def lead(self, holder: str, now: float, *, ttl_s: float) -> Lease:
        """Ask to lead; returns the lease that holds now."""
        self._lease = next_lease(self._lease, holder, now=now, ttl_s=ttl_s)
        return self._lease

    def close(self) -> None:
        """Nothing to let go of."""
