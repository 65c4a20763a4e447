"""Pickles of plain containers, strings and numbers, read without an unpickler.

A pickle is a program for a small stack machine. This module is such a machine that knows only the instructions for
plain data: there is none in it that looks up a name, calls anything or builds an object, so nothing foreign can run. A
pickle that is cut off gives what came before the cut.
"""

from __future__ import annotations

import contextlib
import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any

from keepstep.errors import RecordError

__all__ = ["LONGEST_PICKLE_BYTES", "read_plain_pickle"]

LONGEST_PICKLE_BYTES = 256 << 20
"""Longer ones are refused."""

_MOST_INSTRUCTIONS = 40_000_000
"""So many instructions are run at most: each can make an object of some dozen bytes out of one byte."""

_LONGEST_NUMBER_BYTES = 1024
_ESCAPED = re.compile(rb"(?:[^\\]+|\\(?:[\\'\"abfnrtv]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}))*+")
"""Text with the escapes that Python writes in a string of protocol 0."""
_STOP, _MARK, _BINGET, _LONG_BINGET = b".(hj"
_NAMES = {ord(instruction.code): instruction.name for instruction in pickletools.opcodes}
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, struct.error, OverflowError, SyntaxError, RecursionError)


class _Refused(Exception):
    """The pickle asks for more than plain data."""


def read_plain_pickle(content: bytes) -> tuple[Any, bool]:
    """The value in `content`, and whether it was complete. Of a pickle that is cut off: what came before the cut.

    Raises RecordError if it is too long, no pickle, or asks for anything but plain containers, strings and numbers.
    Nothing in it is executed.
    """
    if len(content) > LONGEST_PICKLE_BYTES:
        raise RecordError(f"a pickle of more than {LONGEST_PICKLE_BYTES >> 20} MiB is not read")
    try:
        return _Machine(content).outcome()
    except _Refused as problem:
        raise RecordError(
            f"not a plain pickle: it {problem}", remedy="do not open this file with pickle; ask who wrote it"
        ) from None


class _Machine:
    """The stack, the stacks below the marks, and the memo."""

    __slots__ = ("at", "content", "memo", "outer", "stack")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def outcome(self) -> tuple[Any, bool]:
        """The value, and whether it is complete. Raises _Refused, and RecordError if there is none at all."""
        try:
            complete = self.run()
        except _DAMAGE:
            complete = False
        if complete and len(self.stack) == 1 and not self.outer:
            return self.stack[0], True
        if not self.stack and not self.outer:
            raise RecordError("not a pickle")
        return self.rescued(), False

    def run(self) -> bool:
        """Run to the end; whether there was one. Raises _Refused, or one of _DAMAGE where the pickle is damaged."""
        content, memo, known = self.content, self.memo, _INSTRUCTIONS
        stack = self.stack
        for _ in range(_MOST_INSTRUCTIONS):
            code = content[self.at]
            self.at += 1
            if code == _BINGET:  # this one and the next two are most of all instructions, hence here
                stack.append(memo[content[self.at]])
                self.at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(content[self.at : self.at + 4], "little")])
                self.at += 4
            elif code == _MARK:
                self.outer.append(stack)
                stack = self.stack = []
            elif code == _STOP:
                return True
            else:
                instruction = known.get(code)
                if instruction is None:
                    self._refuse(code)
                else:
                    instruction(self)
                    stack = self.stack
        raise _Refused(f"has more than {_MOST_INSTRUCTIONS} instructions")

    def _refuse(self, code: int) -> None:
        if code not in _NAMES:
            raise ValueError(f"no instruction {code}")
        raise _Refused(f"contains the instruction {_NAMES[code]}")

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises ValueError if there are fewer."""
        end = self.at + count
        if count < 0 or end > len(self.content):
            raise ValueError("cut off")
        piece = self.content[self.at : end]
        self.at = end
        return piece

    def line(self) -> bytes:
        """The bytes to the end of the line, without it. Raises ValueError if there is no end."""
        end = self.content.index(b"\n", self.at)
        piece = self.content[self.at : end]
        self.at = end + 1
        return piece

    def marked(self) -> list[Any]:
        """What was put on the stack since the last mark, which is taken away."""
        values = self.stack
        self.stack = self.outer.pop()
        return values

    def rescued(self) -> Any:
        """The outermost value, with what was on its way into it put in place."""
        level = self.stack
        while self.outer:
            outer = self.outer.pop()
            if outer:
                _put_if_plain(outer[-1], level)
            elif level:
                outer.append(level[0])
            level = outer
        for earlier, later in zip(level[:-1], level[1:], strict=True):
            _put_if_plain(earlier, [later])
        return level[0] if level else None


def _put(container: Any, values: list[Any]) -> None:
    """Append to a list, or set pairs in a dictionary; a key without its value is left out."""
    if isinstance(container, list):
        container.extend(values)
    elif isinstance(container, dict):
        for key, value in zip(values[::2], values[1::2], strict=False):
            container[_key(key)] = value


def _put_if_plain(container: Any, values: list[Any]) -> None:
    """The same of what a cut left over, as far as it makes sense."""
    with contextlib.suppress(_Refused):
        _put(container, values)


_Instruction = Callable[[_Machine], None]


def _constant(value: Any) -> _Instruction:
    return lambda machine: machine.stack.append(value)


def _fixed(form: str) -> _Instruction:
    """A number of fixed length."""
    parts = struct.Struct(form)
    size = parts.size

    def push(machine: _Machine) -> None:
        machine.stack.append(parts.unpack_from(machine.content, machine.at)[0])
        machine.at += size

    return push


def _sized(form: str, value: Callable[[bytes], Any]) -> _Instruction:
    """Bytes with their length in front."""
    parts = struct.Struct(form)
    size = parts.size

    def push(machine: _Machine) -> None:
        length = parts.unpack_from(machine.content, machine.at)[0]
        machine.at += size
        machine.stack.append(value(machine.take(length)))

    return push


def _in_line(value: Callable[[bytes], Any]) -> _Instruction:
    """A value in text, to the end of the line."""
    return lambda machine: machine.stack.append(value(machine.line()))


def _store(number: Callable[[_Machine], int]) -> _Instruction:
    def store(machine: _Machine) -> None:
        machine.memo[number(machine)] = machine.stack[-1]

    return store


def _recall(number: Callable[[_Machine], int]) -> _Instruction:
    return lambda machine: machine.stack.append(machine.memo[number(machine)])


def _tuple_of(size: int) -> _Instruction:
    def push(machine: _Machine) -> None:
        if len(machine.stack) < size:
            raise ValueError("cut off")
        machine.stack[-size:] = [tuple(machine.stack[-size:])]

    return push


def _collect(make: Callable[[list[Any]], Any]) -> _Instruction:
    """A container of all that was put on the stack since the mark."""

    def push(machine: _Machine) -> None:
        values = machine.marked()
        machine.stack.append(make(values))

    return push


def _into_container(machine: _Machine) -> None:
    values = machine.marked()
    _put(machine.stack[-1], values)


def _last_into(count: int) -> _Instruction:
    def put(machine: _Machine) -> None:
        values = machine.stack[-count:]
        del machine.stack[-count:]
        _put(machine.stack[-1], values)

    return put


def _dictionary(values: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def _key(value: Any) -> Any:
    """The key of a dictionary. Raises _Refused if it is a container: to hash a deeply nested one ends the process."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    raise _Refused("has a key that is neither text nor number")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _whole(raw: bytes) -> int:
    if len(raw) > _LONGEST_NUMBER_BYTES:
        raise ValueError("a number of more than a thousand bytes")
    return int.from_bytes(raw, "little", signed=True)


def _decimal(raw: bytes) -> int | bool:
    """Numbers in text; `00` and `01` are the truth values of protocol 0."""
    return {b"00": False, b"01": True}[raw] if raw in (b"00", b"01") else int(raw.rstrip(b"L"))


def _quoted(raw: bytes) -> str:
    """A string of protocol 0, quoted as Python writes it."""
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in (b"'", b'"'):
        raise ValueError("no string")
    inner = raw[1:-1]
    if b"\\" not in inner:
        return inner.decode("latin-1")
    if not _ESCAPED.fullmatch(inner):
        raise ValueError("no string")
    return inner.decode("unicode_escape")


def _memo_byte(machine: _Machine) -> int:
    return machine.take(1)[0]


def _memo_four(machine: _Machine) -> int:
    return int.from_bytes(machine.take(4), "little")


def _memo_line(machine: _Machine) -> int:
    return int(machine.line())


def _memo_next(machine: _Machine) -> int:
    return len(machine.memo)


def _skip(count: int) -> _Instruction:
    def skip(machine: _Machine) -> None:
        machine.take(count)

    return skip


_BY_NAME: dict[str, _Instruction] = {
    "PROTO": _skip(1),
    "FRAME": _skip(8),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "BININT": _fixed("<i"),
    "BININT1": _fixed("<B"),
    "BININT2": _fixed("<H"),
    "BINFLOAT": _fixed(">d"),
    "LONG1": _sized("<B", _whole),
    "LONG4": _sized("<i", _whole),
    "INT": _in_line(_decimal),
    "LONG": _in_line(_decimal),
    "FLOAT": _in_line(float),
    "STRING": _in_line(_quoted),
    "UNICODE": _in_line(lambda raw: raw.decode("raw-unicode-escape")),
    "BINSTRING": _sized("<i", lambda raw: raw.decode("latin-1")),
    "SHORT_BINSTRING": _sized("<B", lambda raw: raw.decode("latin-1")),
    "BINUNICODE": _sized("<I", _text),
    "SHORT_BINUNICODE": _sized("<B", _text),
    "BINUNICODE8": _sized("<Q", _text),
    "BINBYTES": _sized("<I", bytes),
    "SHORT_BINBYTES": _sized("<B", bytes),
    "BINBYTES8": _sized("<Q", bytes),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _collect(tuple),
    "LIST": _collect(list),
    "DICT": _collect(_dictionary),
    "APPEND": _last_into(1),
    "SETITEM": _last_into(2),
    "APPENDS": _into_container,
    "SETITEMS": _into_container,
    "BINPUT": _store(_memo_byte),
    "LONG_BINPUT": _store(_memo_four),
    "PUT": _store(_memo_line),
    "MEMOIZE": _store(_memo_next),
    "GET": _recall(_memo_line),
}
_INSTRUCTIONS: dict[int, _Instruction] = {code: _BY_NAME[name] for code, name in _NAMES.items() if name in _BY_NAME}
