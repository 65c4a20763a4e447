"""Host memory: what is still free, and plain blocks of it that are used again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Block", "copy_bytes", "free_bytes"]

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_V2 = "0::"


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


def free_bytes(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, *, membership: Path = _MEMBERSHIP) -> int:
    """What can still be allocated without swapping: the least of what the system and the cgroups (version 2) say that
    this process is in, which are its own and all above it."""
    limits = (_below_limit(group) for group in _own_groups(groups, membership))
    return max(0, min(_available(meminfo), *limits))


def _own_groups(groups: Path, membership: Path) -> Iterator[Path]:
    """The directories of the cgroup of this process and of those above it, up to `groups`, where they are mounted."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix(_V2) for line in lines if line.startswith(_V2)), "/")
    names = [name for name in path.split("/") if name]
    if ".." in names:  # it lies outside of what is mounted here
        names = []
    for depth in range(len(names), -1, -1):
        yield groups.joinpath(*names[:depth])


def _below_limit(group: Path) -> int:
    """What `group` may still take; what it keeps of files only to read them faster does not count as taken."""
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group / name)) is not None]
    taken = _number(group / "memory.current")
    if not limits or taken is None:
        return 1 << 62
    return min(limits) - taken + _inactive_files(group)


def _inactive_files(group: Path) -> int:
    try:
        words = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        return next((int(word[1]) for word in words if word[0] == "inactive_file"), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _number(file: Path) -> int | None:
    """What the file says; None where there is no such file, or no limit ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
