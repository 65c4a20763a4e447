"""A codec for plain Python trees that never unpickles: what optimizers, schedulers and loaders keep as state.

Carried: dict, list, tuple, set, frozenset, None, bool, int of any size, float and complex (bit exact), str, bytes,
Counter, OrderedDict, torch dtype, device and Size, numpy scalars and arrays. Tensors leave the bytes and become
numbered references (`pack`), or stay inside (`dumps`). Everything else is refused by the name of its place.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import UnsupportedState
from keepstep.training.memory import memory_of, plain

__all__ = ["LONG_BYTES", "MAX_DEPTH", "Packed", "Sharded", "dumps", "flatten", "pack"]

MAX_DEPTH = 100
LONG_BYTES = 256
_NUMPY_KINDS = "biufcSUmM"
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LENGTH = struct.Struct("<cI")
_INT = struct.Struct("<cq")
_FLOAT = struct.Struct("<cd")
_COMPLEX = struct.Struct("<cdd")


@dataclass(frozen=True)
class Sharded:
    """The local part of a distributed tensor.

    `placements` holds one tuple per mesh dimension, such as `("shard", 0)`; `shape` and `stride` are the global ones;
    `mesh` holds the names and sizes of the mesh dimensions.
    """

    local: torch.Tensor
    placements: tuple[tuple[Any, ...], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mesh: tuple[Any, ...]


@dataclass(frozen=True)
class Packed:
    """A tree as bytes, its tensors in the order of their numbers, and the place of each in the tree."""

    data: bytes
    tensors: list[torch.Tensor]
    paths: list[str]


class _Writer:
    """One walk over a tree. `canonical` sorts dict keys, so that equal trees give equal bytes."""

    def __init__(self, root: str, *, canonical: bool, inline: bool) -> None:
        self.out: list[bytes] = []
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self.long: dict[bytes, int] = {}
        self._trail: list[str] = [root]
        self._canonical = canonical
        self._inline = inline

    def place(self) -> str:
        """The place in the tree as a reader would write it: `scheduler.lr_lambdas[0]`."""
        return "".join(self._trail).lstrip(".")

    def write(self, value: Any) -> None:
        """Append one value."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
        elif not _write_numpy(self, value):
            raise self.refuse(f"a {type(value).__module__}.{type(value).__qualname__} cannot be carried")

    def refuse(self, what: str) -> UnsupportedState:
        """The error for the present place."""
        return UnsupportedState(
            what, where=self.place(), remedy="track an object whose state_dict() holds plain values and tensors only"
        )

    def enter(self, step: str) -> None:
        """Go down one level. Raises UnsupportedState for trees too deep (or containing themselves)."""
        self._trail.append(step)
        if len(self._trail) > MAX_DEPTH:
            raise self.refuse(f"more than {MAX_DEPTH} levels deep, or a container that contains itself")

    def leave(self) -> None:
        """Go up one level."""
        self._trail.pop()

    def blob(self, tag: bytes, data: bytes | memoryview) -> None:
        """A tag, a length and bytes."""
        if len(data) >= 1 << 32:
            raise self.refuse(f"{len(data)} bytes in one value, at most {(1 << 32) - 1} are allowed")
        self.out.append(_LENGTH.pack(tag, len(data)))
        self.out.append(bytes(data))

    def items(self, tag: bytes, values: Iterable[Any]) -> None:
        """A tag, a count and values in their order."""
        values = list(values)
        self.out.append(_LENGTH.pack(tag, len(values)))
        for index, value in enumerate(values):
            self.enter(f"[{index}]")
            self.write(value)
            self.leave()

    def mapping(self, tag: bytes, value: dict[Any, Any], *, ordered: bool = False) -> None:
        """A tag, a count, and key after value."""
        pairs = [(self._alone(key), key) for key in value]
        if self._canonical and not ordered:
            pairs.sort(key=lambda pair: pair[0])
        self.out.append(_LENGTH.pack(tag, len(pairs)))
        for data, key in pairs:
            self.out.append(data)
            self.enter(f".{key}" if isinstance(key, str) else f"[{key!r}]")
            self.write(value[key])
            self.leave()

    def unordered(self, tag: bytes, values: Iterable[Any]) -> None:
        """A tag, a count and values in the order of their bytes."""
        parts = sorted(self._alone(value) for value in values)
        self.out.append(_LENGTH.pack(tag, len(parts)))
        self.out.extend(parts)

    def tensor(self, value: torch.Tensor) -> None:
        """A reference, or the tensor itself where everything stays inside."""
        why = plain(value)
        if why:
            raise self.refuse(why)
        if self._inline:
            local = value.detach().cpu().contiguous()
            self.items(b"t", (str(local.dtype)[6:], tuple(local.shape)))
            self.blob(b"B", memory_of(local))
            return
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.paths.append(self.place())
        self.out.append(_LENGTH.pack(b"T", number))

    def _alone(self, value: Any) -> bytes:
        """A key or a member of a set: hashable, so free of tensors that matter."""
        if type(value) is str:
            data = value.encode("utf-8", "surrogatepass")
            return _LENGTH.pack(b"s", len(data)) + data
        if isinstance(value, torch.Tensor):
            raise self.refuse("a tensor as a key cannot be carried")
        outer, self.out = self.out, []
        self.enter(f"[{value!r:.40}]")
        self.write(value)
        self.leave()
        data = b"".join(self.out)
        self.out = outer
        return data


def _write_int(writer: _Writer, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        writer.out.append(_INT.pack(b"i", value))
    else:
        writer.blob(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_bytes(writer: _Writer, value: bytes) -> None:
    """Long bytes that came before are written as their number."""
    if len(value) < LONG_BYTES:
        writer.blob(b"b", value)
        return
    number = writer.long.get(value)
    if number is None:
        writer.long[value] = len(writer.long)
        writer.blob(b"b", value)
    else:
        writer.out.append(_LENGTH.pack(b"R", number))


def _write_sharded(writer: _Writer, value: Sharded) -> None:
    writer.items(b"H", (value.local, value.placements, value.shape, value.stride, value.mesh))


def _write_numpy(writer: _Writer, value: Any) -> bool:
    """Numpy scalars and arrays of plain kinds; False for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    if value.dtype.kind not in _NUMPY_KINDS or not value.dtype.itemsize:
        raise writer.refuse(f"a numpy value of type {value.dtype} cannot be carried")
    scalar = isinstance(value, numpy.generic)
    writer.items(b"n" if scalar else b"a", (value.dtype.str, tuple(value.shape), value.tobytes()))
    return True


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): lambda writer, value: writer.out.append(b"N"),
    bool: lambda writer, value: writer.out.append(b"1" if value else b"0"),
    int: _write_int,
    float: lambda writer, value: writer.out.append(_FLOAT.pack(b"f", value)),
    complex: lambda writer, value: writer.out.append(_COMPLEX.pack(b"c", value.real, value.imag)),
    str: lambda writer, value: writer.blob(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: _write_bytes,
    list: lambda writer, value: writer.items(b"l", value),
    tuple: lambda writer, value: writer.items(b"u", value),
    set: lambda writer, value: writer.unordered(b"S", value),
    frozenset: lambda writer, value: writer.unordered(b"Z", value),
    dict: lambda writer, value: writer.mapping(b"d", value),
    Counter: lambda writer, value: writer.mapping(b"C", value),
    OrderedDict: lambda writer, value: writer.mapping(b"O", value, ordered=True),
    torch.dtype: lambda writer, value: writer.blob(b"y", str(value)[6:].encode()),
    torch.device: lambda writer, value: writer.blob(b"D", str(value).encode()),
    torch.Size: lambda writer, value: writer.items(b"z", value),
    Sharded: _write_sharded,
    **dict.fromkeys(_TENSORS, _Writer.tensor),
}


def flatten(tree: Any, *, root: str = "", canonical: bool = False) -> Packed:
    """Pack `tree` and name the place of every tensor, from `root` on.

    With `canonical`, dict keys are sorted: trees that compare equal give equal bytes (OrderedDict keeps its order).
    Raises UnsupportedState naming the place of a value that cannot be carried.
    """
    writer = _Writer(root, canonical=canonical, inline=False)
    writer.write(tree)
    return Packed(b"".join(writer.out), writer.tensors, writer.paths)


def pack(tree: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The tree as bytes with numbered references, and the tensors (not copied) in the order of the numbers.

    Raises UnsupportedState naming the place of a value that cannot be carried.
    """
    packed = flatten(tree)
    return packed.data, packed.tensors


def dumps(tree: Any, *, canonical: bool = False) -> bytes:
    """The tree as bytes with its tensors inside; for small trees. `canonical` as in `flatten`.

    Raises UnsupportedState as `pack`.
    """
    writer = _Writer("", canonical=canonical, inline=True)
    writer.write(tree)
    return b"".join(writer.out)
