"""Rows of a delimited text whose fields may hold line breaks, delimiters and bytes that are no text.

Most lines are well formed and are cut by Arrow in blocks. The others are put together line by line: a line with too
few delimiters goes on in the next one; one with too many has the delimiter inside a field of free text, and is
taken if there is exactly one such field with which all the other columns look right. What is left is kept aside.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import csv

__all__ = ["MAX_COLUMNS", "MAX_LINE_BYTES_OF_TEXT", "Aside", "Layout", "RowBlock", "read_rows"]

MAX_COLUMNS = 1000
MAX_LINE_BYTES_OF_TEXT = 8 * 1024 * 1024
"""Longest line and longest row put together of several lines."""
_BLOCK_BYTES = 32 * 1024 * 1024
_MAX_ROW_LINES = 1000
_MAX_EXCESS = 200
_MARK = "\x1f"


class Aside(msgspec.Struct, frozen=True):
    """A row that was not understood: its line, why, and how it begins."""

    line: int
    reason: str
    excerpt: str


class Layout(msgspec.Struct, frozen=True):
    """How the rows are written: `columns` (lower case), `delimiter`, whether each line ends with one (sacct -p).

    `use` names the columns that are wanted, `free` those of free text; `fits(column, value)` says whether a value
    looks right.
    """

    columns: tuple[str, ...]
    delimiter: str
    closed: bool
    use: frozenset[str]
    free: frozenset[str]
    fits: Callable[[str, str], bool]


class RowBlock(msgspec.Struct, frozen=True):
    """Some rows: their wanted columns as text, the line of each, what was kept aside, and how many bytes were bad."""

    rows: pa.Table
    lines: np.ndarray
    aside: tuple[Aside, ...]
    bad_bytes: int


def read_rows(stream: BinaryIO, layout: Layout, *, first_line: int = 2) -> Iterator[RowBlock]:
    """The rows of `stream`, which stands behind its header; block by block, in order. Memory is bounded."""
    reader = _Reader(layout, first_line)
    while data := stream.read(_BLOCK_BYTES):
        yield from reader.take(data, last=False)
    yield from reader.take(b"", last=True)


class _Reader:
    """Cuts blocks at ends of lines and remembers what a row that goes on has so far."""

    def __init__(self, layout: Layout, first_line: int) -> None:
        self.layout = layout
        self.line = first_line
        self.rest = b""
        self.skipping = False
        self.joiner = _Joiner(layout)

    def take(self, data: bytes, *, last: bool) -> Iterator[RowBlock]:
        """Rows that are whole now."""
        data = self._after_overlong(self.rest + data)
        if last and data and not data.endswith(b"\n"):
            data += b"\n"
        cut = data.rfind(b"\n") + 1
        self.rest = data[cut:]
        overlong: list[Aside] = []
        if len(self.rest) > MAX_LINE_BYTES_OF_TEXT:
            line = self.line + data.count(b"\n")
            reason = f"a line of more than {MAX_LINE_BYTES_OF_TEXT} bytes"
            overlong.append(Aside(line, reason, _excerpt(self.rest[:400])))
            self.skipping, self.rest = True, b""
        if cut or overlong or last:
            yield self._block(data[:cut], overlong, last=last)

    def _after_overlong(self, data: bytes) -> bytes:
        """`data` without the rest of a line that is too long."""
        if not self.skipping:
            return data
        end = data.find(b"\n") + 1
        if not end:
            return b""
        self.skipping = False
        self.line += 1
        return data[end:]

    def _block(self, data: bytes, overlong: list[Aside], *, last: bool) -> RowBlock:
        data, bad = _as_text(data, self.layout.delimiter)
        lines = data.count(b"\n")
        block = self._whole(data, lines) if not self.joiner.pending else None
        if block is None:
            block = self._mended(data, last=last)
        self.line += lines
        return RowBlock(block.rows, block.lines, (*block.aside, *overlong), bad)

    def _whole(self, data: bytes, lines: int) -> RowBlock | None:
        """The rows if every line is one; else None."""
        rows = _cut(data, self.layout)
        if rows.num_rows != lines:
            return None
        return RowBlock(rows, np.arange(self.line, self.line + lines), (), 0)

    def _mended(self, data: bytes, *, last: bool) -> RowBlock:
        """The rows where some lines are not one."""
        lines = data.split(b"\n")[:-1]
        wanted = len(self.layout.columns) - 1 + self.layout.closed
        mark = _MARK.encode()
        good: list[bytes] = []
        numbers: list[int] = []
        for number, line in enumerate(lines, self.line):
            if not self.joiner.pending and line.count(mark) == wanted:
                good.append(line)
                numbers.append(number)
            elif line or self.joiner.pending:
                self._join(line, number, good=good, numbers=numbers)
        if last:
            self.joiner.give_up()
        for number, row in self.joiner.rows:
            good.append(row)
            numbers.append(number)
        aside = tuple(self.joiner.aside)
        self.joiner.rows, self.joiner.aside = [], []
        rows = _cut(b"\n".join([*good, b""]), self.layout)
        return RowBlock(rows, np.array(numbers, dtype=np.int64), aside, 0)

    def _join(self, line: bytes, number: int, *, good: list[bytes], numbers: list[int]) -> None:
        if self.joiner.starts_anew(line):
            self.joiner.give_up()
            good.append(line)
            numbers.append(number)
        else:
            self.joiner.add(line, number)


class _Joiner:
    """Puts one row together from lines that are no rows by themselves."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pending: list[bytes] = []
        self.size = 0
        self.begin = 0
        self.rows: list[tuple[int, bytes]] = []
        self.aside: list[Aside] = []

    def starts_anew(self, line: bytes) -> bool:
        """Whether `line` is a good row, so that what is pending cannot go on in it."""
        fields = self._fields(line)
        return bool(self.pending) and len(fields) == len(self.layout.columns) and self._fit(fields)

    def add(self, line: bytes, number: int) -> None:
        """One more line; the row is taken if it is whole now."""
        if not self.pending:
            self.begin, self.size = number, 0
        self.pending.append(line)
        self.size += len(line) + 1
        fields = self._fields(b"\n".join(self.pending)) if self.size <= MAX_LINE_BYTES_OF_TEXT else []
        excess = len(fields) - len(self.layout.columns)
        if excess >= 0 and (row := self._resolved(fields, excess)) is not None:
            safe = [field.replace("\n", " ").replace("\r", " ") for field in row]
            end = [""] if self.layout.closed else []
            self.rows.append((self.begin, _MARK.join([*safe, *end]).encode()))
            self.pending = []
        elif excess > _MAX_EXCESS or len(self.pending) >= _MAX_ROW_LINES or self.size > MAX_LINE_BYTES_OF_TEXT:
            self.give_up()

    def give_up(self) -> None:
        """Keeps what is pending aside."""
        if not self.pending:
            return
        text = b" ".join(self.pending)
        wanted, found = len(self.layout.columns), len(self._fields(text[:MAX_LINE_BYTES_OF_TEXT]))
        if found < wanted:
            reason = f"{found} fields where {wanted} are expected"
        else:
            reason = f"{found} fields where {wanted} are expected: the delimiter stands inside a field"
        self.aside.append(Aside(self.begin, reason, _excerpt(text.replace(_MARK.encode(), b"|"))))
        self.pending = []

    def _fields(self, line: bytes) -> list[str]:
        mark = _MARK.encode()
        if line.count(mark) > len(self.layout.columns) + _MAX_EXCESS + 1:
            return [""] * (line.count(mark) + 1)
        fields = line.decode().split(_MARK)
        return fields[:-1] if self.layout.closed and fields[-1].strip() == "" else fields

    def _fit(self, fields: list[str]) -> bool:
        return all(self.layout.fits(column, field) for column, field in zip(self.layout.columns, fields, strict=True))

    def _resolved(self, fields: list[str], excess: int) -> list[str] | None:
        """The fields with the surplus delimiters put back into the one column where they can belong."""
        if excess == 0:
            return fields if self._fit(fields) else None
        if excess > _MAX_EXCESS:
            return None
        found: list[list[str]] = []
        for index, column in enumerate(self.layout.columns):
            if column in self.layout.free:
                inside = self.layout.delimiter.join(fields[index : index + excess + 1])
                row = [*fields[:index], inside, *fields[index + excess + 1 :]]
                if self._fit(row):
                    found.append(row)
        told = {
            tuple(cell for name, cell in zip(self.layout.columns, row, strict=True) if self._counts(name))
            for row in found
        }
        return found[0] if len(told) == 1 else None

    def _counts(self, column: str) -> bool:
        """Whether two readings of a row that differ in `column` are different rows."""
        return column in self.layout.use and column != "comment"


_BAD_BREAK = re.compile(rb"\r(?!\n)|\x00")


def _as_text(data: bytes, delimiter: str) -> tuple[bytes, int]:
    """`data` as UTF-8 with one mark as delimiter and `\\n` as end of line, and the number of bytes that were bad."""
    bad = 0
    try:
        data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        bad = text.count("�")
        data = text.encode()
    if b"\r" in data or b"\x00" in data:
        data = _BAD_BREAK.sub(b" ", data.replace(b"\r\n", b"\n"))
    mark = _MARK.encode()
    if mark != delimiter.encode() and mark in data:
        data = data.replace(mark, b" ")
    return data.replace(delimiter.encode(), mark), bad


def _cut(data: bytes, layout: Layout) -> pa.Table:
    """Marked lines as a table of the wanted columns; lines that are no rows, and empty ones, are left out."""
    names = [*layout.columns, "_end"] if layout.closed else list(layout.columns)
    use = [name for name in layout.columns if name in layout.use]
    if not data:
        return pa.table({name: pa.array([], pa.string()) for name in use})
    return csv.read_csv(
        io.BytesIO(data),
        read_options=csv.ReadOptions(column_names=names, block_size=1 << 22),
        parse_options=csv.ParseOptions(
            delimiter=_MARK,
            quote_char=False,
            double_quote=False,
            escape_char=False,
            newlines_in_values=False,
            ignore_empty_lines=True,
            invalid_row_handler=lambda _: "skip",
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(use, pa.string()), include_columns=use, strings_can_be_null=False
        ),
    )


def _excerpt(line: bytes) -> str:
    return line[:400].decode(errors="replace")[:200]
