"""The recorder's memory as this process sees it, and the clock door of the training side.

The memory belongs to the agent (it outlives this process). The data plane writes the records; this module writes who
we are, and the rank's own state that only this process has.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from ctypes import addressof, c_char

from keepstep.records.ring import MAX_PRIVATE_BYTES, ring_bytes, write_private
from keepstep.records.ring_layout import SLOT_BYTES

__all__ = ["Recorder"]

_log = logging.getLogger("keepstep")

_HEADER_BYTES = 8192
_DEFAULT_SLOTS = 16384


class Recorder:
    """The mapped ring of one process. `member` is the name its agent gave it ("" without an agent)."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._first = c_char.from_buffer(memory)
        self.address = addressof(self._first)
        self.size = len(memory)
        self.member = bytes(memory[80:128]).split(b"\0", 1)[0].decode("utf-8", "replace")
        self._too_large = False
        capacity = (self.size - ring_bytes(0)) // SLOT_BYTES
        offset = time.time_ns() - time.monotonic_ns()
        memory[0:24] = struct.pack("<8sIIQ", b"KSRING01", 1, SLOT_BYTES, capacity)
        memory[48:64] = struct.pack("<qIi", offset, os.getpid(), -1)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Recorder:
        """Map the agent's memory; closes `descriptor`."""
        try:
            return cls(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    @classmethod
    def private_memory(cls, slots: int = _DEFAULT_SLOTS) -> Recorder:
        """A ring of this process alone, for jobs without an agent."""
        return cls(mmap.mmap(-1, ring_bytes(slots)))

    def identify(self, *, rank: int) -> None:
        """Write the rank into the header."""
        self._memory[60:64] = struct.pack("<i", rank)

    def wall_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def slots_written(self) -> int:
        """Slots reserved since the ring was made, those overwritten since included."""
        return int(struct.unpack_from("<Q", self._memory, 24)[0])

    def publish_private(self, version: int, data: bytes) -> None:
        """Leave the rank's own state of `version` (RNG, data position) where it survives this process."""
        if len(data) <= MAX_PRIVATE_BYTES:
            write_private(self._memory, version, data=data)
        elif not self._too_large:
            self._too_large = True
            _log.warning(
                "the rank's own state has %d bytes, %d fit: a replacement starts with fresh random numbers",
                len(data),
                MAX_PRIVATE_BYTES,
            )
