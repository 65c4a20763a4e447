"""The memory of one recorder ring: made and held by the agent, written by the training process, readable after it."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

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

    def close(self) -> None:
        """Give the memory back."""
        self._map.close()
        os.close(self.descriptor)
