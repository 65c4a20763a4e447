"""Host memory: what is still free, and plain blocks of it that are used again."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

__all__ = ["Block", "copy_bytes", "free_bytes"]

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class Block:
    """`nbytes` of host memory that no Python object owns a copy of; given back to the system when it is dropped."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, max(1, nbytes))
        self.view = memoryview(self._memory)[:nbytes]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """`target[:] = source` for writable views of one size, without holding the interpreter's lock."""
    size = len(source)
    if size != len(target):
        raise ValueError(f"{size} bytes do not fit {len(target)}")
    if size:
        array = ctypes.c_ubyte * size
        ctypes.memmove(array.from_buffer(target), array.from_buffer(source), size)


def free_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int:
    """What can still be allocated without swapping, as the system or (version 2, if it is less) our cgroup says."""
    free = _available(meminfo)
    try:
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        pass
    return max(0, free)


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
