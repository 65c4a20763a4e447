"""The memory of one recorder ring: made and held by the agent, written by the training process, readable after it."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep.errors import EnvironmentProblem
from keepstep.records.ring import ring_bytes

__all__ = ["RingMemory"]

_MEMBER_BYTES = 48
_MEMBER_OFFSET = 80
_STEP_OFFSET = 72
_STEP = struct.Struct("<Q")


class RingMemory:
    """A sealed memfd of `slots` slots; `descriptor` is what the process gets. It outlives the process."""

    def __init__(self, member: str, *, slots: int) -> None:
        """Zeroed memory that already carries the name of `member`. Raises EnvironmentProblem without memory."""
        name = member.encode()[: _MEMBER_BYTES - 1]
        size = ring_bytes(slots)
        try:
            self.descriptor = os.memfd_create("keepstep-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(self.descriptor, name, _MEMBER_OFFSET)
            self._map = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
            self._lock = threading.Lock()
            self._readers = 0
            self._closed = False
        except OSError as error:
            raise EnvironmentProblem(
                f"no memory for a recorder ring of {size} bytes: {error.strerror}",
                where=member,
                remedy="free memory, or set ring_slots lower",
            ) from error

    def step(self) -> int:
        """The step the process says it is in."""
        return int(_STEP.unpack_from(self._map, _STEP_OFFSET)[0])

    def snapshot(self) -> bytes:
        """A copy of the whole ring."""
        return bytes(self._map)

    def view(self) -> memoryview:
        """The ring as it is being written; release it (it is a context manager) before `close`."""
        return memoryview(self._map)

    @contextmanager
    def held(self) -> Iterator[memoryview | None]:
        """The ring for a reader in another thread, which keeps it open; None if it is closed already."""
        with self._lock:
            closed = self._closed
            self._readers += not closed
        if closed:
            yield None
            return
        try:
            with memoryview(self._map) as view:
                yield view
        finally:
            with self._lock:
                self._readers -= 1
                last = self._closed and not self._readers
            if last:
                self._free()

    def close(self) -> None:
        """Give the memory back, at the latest when the last reader has let it go."""
        with self._lock:
            free = not self._closed and not self._readers
            self._closed = True
        if free:
            self._free()

    def _free(self) -> None:
        self._map.close()
        os.close(self.descriptor)
