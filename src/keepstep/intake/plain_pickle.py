"""Pickles of plain containers, strings and numbers, read without ever running what is in them.

Whole pickles go through the C unpickler of the standard library with every way to a class, function, extension code or
persistent object refused. A pickle that is cut off goes through a small machine of our own that knows only the
instructions for plain data, so that what came before the cut is not lost.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

from keepstep.errors import RecordError

__all__ = ["LONGEST_PICKLE_BYTES", "read_plain_pickle"]

LONGEST_PICKLE_BYTES = 256 << 20
"""Longer ones are refused: an instruction of one byte can make an object of some dozen bytes."""

_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class _Refused(pickle.UnpicklingError):
    """The pickle asks for more than plain data."""


class _Plain(pickle.Unpickler):
    """The unpickler of the standard library without any door to code."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"asks for {module}.{name}"[:120])

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("asks for a persistent object")


def read_plain_pickle(content: bytes) -> tuple[Any, bool]:
    """The value in `content`, and whether it was complete. Of a pickle that is cut off: what came before the cut.

    Raises RecordError if it is too long, no pickle, or asks for anything but plain containers, strings and numbers.
    Nothing in it is executed.
    """
    if len(content) > LONGEST_PICKLE_BYTES:
        raise RecordError(f"a pickle of more than {LONGEST_PICKLE_BYTES >> 20} MiB is not read")
    try:
        return _Plain(io.BytesIO(content)).load(), True
    except _Refused as problem:
        raise RecordError(
            f"not a plain pickle: it {problem}", remedy="do not open this file with pickle; ask who wrote it"
        ) from None
    except _DAMAGE:
        pass
    machine = _Machine()
    machine.run(content)
    if not machine.began:
        raise RecordError("not a pickle")
    return machine.rescued(), False


class _Machine:
    """Runs the instructions of a pickle as far as they are whole; refuses those that are not for plain data."""

    def __init__(self) -> None:
        self.began = False
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> None:
        """Run until the end or the first damage. Raises RecordError at an instruction that could run code."""
        try:
            for instruction, argument, _ in pickletools.genops(content):
                self._step(instruction.name, argument)
                self.began = self.began or bool(self._stack) or bool(self._outer)
        except _Refused as problem:
            raise RecordError(f"not a plain pickle: it {problem}") from None
        except _DAMAGE:
            return

    def rescued(self) -> Any:
        """The outermost value, with what was on its way into it put in place."""
        level = self._stack
        while self._outer:
            outer = self._outer.pop()
            if outer:
                _put(outer[-1], level)
            elif level:
                outer.append(level[0])
            level = outer
        for earlier, later in zip(level[:-1], level[1:], strict=True):
            _put(earlier, [later])
        return level[0] if level else None

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in _TUPLES:
            size = _TUPLES[name]
            stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
        elif name == "MARK":
            self._outer.append(stack)
            self._stack = []
        elif name in _COLLECTORS:
            self._stack = self._outer.pop()
            _COLLECTORS[name](self._stack, stack)
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            values = stack[-count:]
            del stack[-count:]
            _put(stack[-1], values)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"contains the instruction {name}")


def _put(container: Any, values: list[Any]) -> None:
    """Append to a list, or set pairs in a dictionary; a key without its value is left out."""
    if isinstance(container, list):
        container.extend(values)
    elif isinstance(container, dict):
        for key, value in zip(values[::2], values[1::2], strict=False):
            container[key] = value


def _tuple(stack: list[Any], values: list[Any]) -> None:
    stack.append(tuple(values))


def _list(stack: list[Any], values: list[Any]) -> None:
    stack.append(values)


def _dict(stack: list[Any], values: list[Any]) -> None:
    stack.append({})
    _put(stack[-1], values)


def _into(stack: list[Any], values: list[Any]) -> None:
    _put(stack[-1], values)


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_COLLECTORS = {"TUPLE": _tuple, "LIST": _list, "DICT": _dict, "APPENDS": _into, "SETITEMS": _into}
