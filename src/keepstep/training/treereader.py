"""The reading half of the tree codec: foreign bytes in, plain values out; every length is checked before it is used."""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keepstep.errors import TornRecord
from keepstep.training.memory import memory_of
from keepstep.training.tree import LONG_BYTES, MAX_DEPTH, Sharded

__all__ = ["loads", "unpack"]

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")
_NUMPY_TYPE = re.compile(r"[<>|=][biufcSUmM][1-9]\d{0,8}(\[\w{1,8}\])?")


class _Reader:
    """A cursor over the bytes of one tree."""

    def __init__(self, data: bytes, tensors: Sequence[Any]) -> None:
        self._data = data
        self._at = 0
        self._depth = 0
        self._tensors = tensors
        self._long: list[bytes] = []

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises TornRecord where they are not there."""
        end = self._at + count
        if end > len(self._data):
            raise TornRecord(f"a tree ends at byte {len(self._data)}, {end} are announced")
        part = self._data[self._at : end]
        self._at = end
        return part

    def number(self) -> int:
        """The next u32."""
        return int(_U32.unpack(self.take(4))[0])

    def blob(self) -> bytes:
        """A length and its bytes."""
        return self.take(self.number())

    def items(self) -> list[Any]:
        """A count and its values."""
        count = self.number()
        if count > len(self._data) - self._at:
            raise TornRecord(f"a tree announces {count} values and has {len(self._data) - self._at} bytes left")
        return [self.read() for _ in range(count)]

    def pairs(self) -> list[tuple[Any, Any]]:
        """A count, and key after value."""
        count = self.number()
        if count > (len(self._data) - self._at) // 2:
            raise TornRecord(f"a tree announces {count} pairs and has {len(self._data) - self._at} bytes left")
        return [(self.read(), self.read()) for _ in range(count)]

    def read(self) -> Any:
        """The next value."""
        self._depth += 1
        if self._depth > MAX_DEPTH + 2:
            raise TornRecord(f"a tree is more than {MAX_DEPTH} levels deep")
        tag = self.take(1)
        read = _READERS.get(tag)
        if read is None:
            raise TornRecord(f"a tree holds the unknown tag {tag!r} at byte {self._at - 1}")
        value = read(self)
        self._depth -= 1
        return value

    def reference(self) -> Any:
        """The tensor with the next number."""
        number = self.number()
        if number >= len(self._tensors):
            raise TornRecord(f"a tree refers to tensor {number} of {len(self._tensors)}")
        return self._tensors[number]

    def text(self) -> bytes:
        """Bytes; long ones are numbered, since they may be meant again."""
        data = self.blob()
        if len(data) >= LONG_BYTES:
            self._long.append(data)
        return data

    def again(self) -> bytes:
        """The long bytes with the next number."""
        number = self.number()
        if number >= len(self._long):
            raise TornRecord(f"a tree refers to bytes {number} of {len(self._long)}")
        return self._long[number]

    def finish(self) -> None:
        """Nothing may follow the tree."""
        if self._at != len(self._data):
            raise TornRecord(f"{len(self._data) - self._at} bytes follow the end of a tree")


def _named(name: bytes) -> torch.dtype:
    dtype = getattr(torch, name.decode(), None)
    if not isinstance(dtype, torch.dtype):
        raise TornRecord(f"a tree holds the unknown tensor type {name!r}")
    return dtype


def _read_tensor(reader: _Reader) -> torch.Tensor:
    name, shape = reader.items()
    reader.take(1)
    data = reader.blob()
    dtype = _named(str(name).encode())
    count = 1
    for size in shape:
        if not isinstance(size, int) or size < 0:
            raise TornRecord(f"a tree holds a tensor of shape {shape}")
        count *= size
    if count * dtype.itemsize != len(data):
        raise TornRecord(f"a tree holds a tensor of shape {shape} with {len(data)} bytes")
    tensor = torch.empty(shape, dtype=dtype)
    memory_of(tensor)[:] = data
    return tensor


def _read_array(reader: _Reader) -> Any:
    import numpy

    name, shape, data = reader.items()
    if not isinstance(name, str) or not _NUMPY_TYPE.fullmatch(name):
        raise TornRecord(f"a tree holds a numpy value of type {name!r}")
    return numpy.frombuffer(data, dtype=numpy.dtype(name)).reshape(shape).copy()


def _read_sharded(reader: _Reader) -> Sharded:
    local, placements, shape, stride, mesh = reader.items()
    return Sharded(local, placements, shape, stride, mesh)


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda reader: None,
    b"1": lambda reader: True,
    b"0": lambda reader: False,
    b"i": lambda reader: _I64.unpack(reader.take(8))[0],
    b"I": lambda reader: int.from_bytes(reader.blob(), "little", signed=True),
    b"f": lambda reader: _F64.unpack(reader.take(8))[0],
    b"c": lambda reader: complex(*_C128.unpack(reader.take(16))),
    b"s": lambda reader: reader.blob().decode("utf-8", "surrogatepass"),
    b"b": _Reader.text,
    b"R": _Reader.again,
    b"l": _Reader.items,
    b"u": lambda reader: tuple(reader.items()),
    b"S": lambda reader: set(reader.items()),
    b"Z": lambda reader: frozenset(reader.items()),
    b"d": lambda reader: dict(reader.pairs()),
    b"C": lambda reader: Counter(dict(reader.pairs())),
    b"O": lambda reader: OrderedDict(reader.pairs()),
    b"y": lambda reader: _named(reader.blob()),
    b"D": lambda reader: torch.device(reader.blob().decode()),
    b"z": lambda reader: torch.Size(reader.items()),
    b"n": lambda reader: _read_array(reader)[()],
    b"a": _read_array,
    b"H": _read_sharded,
    b"T": _Reader.reference,
    b"t": _read_tensor,
}


def unpack(data: bytes, tensors: Sequence[Any] = ()) -> Any:
    """The tree that `pack` wrote, with `tensors` in the place of the references.

    Raises TornRecord for anything that is not a whole, well-formed tree.
    """
    reader = _Reader(data, tensors)
    try:
        value = reader.read()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TornRecord(f"not a tree: {error}") from error
    reader.finish()
    return value


def loads(data: bytes) -> Any:
    """The tree that `dumps` wrote. Raises TornRecord as `unpack`."""
    return unpack(data)
