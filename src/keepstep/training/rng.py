"""The state of the random generators of this process: torch (CPU, and CUDA where it is in use), numpy and random."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

from keepstep.errors import TornRecord
from keepstep.training.memory import memory_of

__all__ = ["capture_rng", "fingerprint", "generator_state", "restore_rng", "set_generator_state"]

_HEAD = 24
_WORDS = 624
_TORCH_BYTES = 5056
_TAIL = _HEAD + 8 * _WORDS
_NO_HIGH_WORDS = bytes(4 * _WORDS)
_RANDOM = struct.Struct("<q625I?d")
_NUMPY = struct.Struct(f"<{4 * _WORDS}sq?d")
_MT19937_BYTES = 4 * _WORDS + 4


def _squeeze(state: torch.Tensor) -> bytes:
    """A CPU generator's state; its 624 words of 32 bits are stored as 64 bits each, the empty halves are left out."""
    raw = bytes(memory_of(state))
    if len(raw) != _TORCH_BYTES:
        return raw
    words = memoryview(raw)[_HEAD:_TAIL].cast("I")
    if words[1::2].tobytes() != _NO_HIGH_WORDS:
        return raw
    return raw[:_HEAD] + words[0::2].tobytes() + raw[_TAIL:]


def _stretch(data: bytes) -> torch.Tensor:
    """The state that `_squeeze` stored."""
    if len(data) == _TORCH_BYTES - 4 * _WORDS:
        words = memoryview(bytearray(8 * _WORDS)).cast("I")
        words[0::2] = memoryview(data)[_HEAD : _HEAD + 4 * _WORDS].cast("I")
        data = data[:_HEAD] + words.tobytes() + data[_HEAD + 4 * _WORDS :]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def generator_state(generator: torch.Generator) -> bytes:
    """The state of one torch generator."""
    return _squeeze(generator.get_state())


def set_generator_state(generator: torch.Generator, data: bytes) -> None:
    """Set what `generator_state` gave. Raises TornRecord for anything else."""
    try:
        generator.set_state(_stretch(data))
    except (RuntimeError, ValueError) as error:
        raise TornRecord(f"not the state of a generator: {error}") from error


class _Numpy:
    """The global generator of numpy. Reading its state takes 45 us, so an untouched one is not read twice.

    It is untouched where its 624 words and position (read in place) are the same as before and no second normal
    number was in store.
    """

    def __init__(self) -> None:
        self._words = b""
        self._data = b""

    def words(self, numpy: Any) -> bytes:
        """The words and the position, read in place; empty for another kind of generator."""
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return b""
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)

    def capture(self, numpy: Any) -> bytes:
        """The packed state."""
        words = self.words(numpy)
        if not words:
            return b""
        if words != self._words:
            name, key, position, has_normal, normal = numpy.random.get_state()
            self._data = _NUMPY.pack(key.tobytes(), int(position), bool(has_normal), float(normal))
            self._words = b"" if has_normal else words
        return self._data

    def restore(self, numpy: Any, data: bytes) -> None:
        """Set what `capture` gave."""
        self._words = b""
        key, position, has_normal, normal = _NUMPY.unpack(data)
        numpy.random.set_state(("MT19937", numpy.frombuffer(key, "<u4"), position, int(has_normal), normal))


_numpy = _Numpy()


def capture_rng() -> dict[str, bytes]:
    """The state of every generator, by name; numpy is left out where nobody imported it. Takes about 25 us."""
    version, words, normal = random.getstate()
    states = {
        "torch": _squeeze(torch.get_rng_state()),
        "random": _RANDOM.pack(version, *words, normal is not None, normal or 0.0),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = _numpy.capture(numpy)
    if torch.cuda.is_initialized():
        states["cuda"] = bytes(memory_of(torch.cuda.get_rng_state()))
    return states


def fingerprint() -> tuple[object, ...]:
    """Compares unequal after any generator was drawn from (but for a second normal number in store of numpy).

    Takes about 12 us.
    """
    numpy = sys.modules.get("numpy")
    words = b"" if numpy is None else _numpy.words(numpy)
    cuda = bytes(memory_of(torch.cuda.get_rng_state())) if torch.cuda.is_initialized() else b""
    return bytes(memory_of(torch.get_rng_state())), random.getstate(), words, cuda


def restore_rng(states: dict[str, bytes]) -> None:
    """Set the generators to what `capture_rng` gave. Raises TornRecord for anything else."""
    try:
        version, *words, has_normal, normal = _RANDOM.unpack(states["random"])
        random.setstate((version, tuple(words), normal if has_normal else None))
        torch.set_rng_state(_stretch(states["torch"]))
        if states.get("numpy"):
            import numpy

            _numpy.restore(numpy, states["numpy"])
        if states.get("cuda") and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise TornRecord(f"not the state of the random generators: {error}") from error
