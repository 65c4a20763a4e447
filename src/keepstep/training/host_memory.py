"""Host memory: plain blocks of it that are used again."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["Block", "copy_bytes"]


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
