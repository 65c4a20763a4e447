"""Tables in files, read in blocks: CSV and JSON lines, Parquet, JSON documents; only the columns that mean something.

What is kept does not depend on the size of the file: MOST_VALUES values of the columns that are used.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from keepstep.errors import RecordError
from keepstep.intake.column_names import Columns, meaning_of, rank_in
from keepstep.intake.plain_json import parsed_json, several_json
from keepstep.intake.reading import opened, whole

__all__ = [
    "DAMAGE",
    "MOST_VALUES",
    "PARQUET",
    "float_of",
    "header_of",
    "is_duration",
    "is_numeric",
    "read_table",
]

MOST_VALUES = 40_000_000
"""Values of one table that are read; that there are more is said."""
PARQUET = b"PAR1"
DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OSError, KeyError, ValueError)
"""What damaged files make the readers of tables raise."""

_RANK = "rank"
_LONGEST_DOCUMENT = 256 << 20
"""Bytes of a JSON document that is no list of lines, which cannot be read in blocks."""
_BLOCK_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_LONGEST_ROW = 64 << 20
_SHOWN = 8
_LONGEST_CELL = 40
_PARQUET_ROWS = 1 << 18
_DELIMITERS = (",", "\t", ";", "|", " ")
_DURATION = r"^\s*(?P<d>-?\d{1,4}) days? \+?(?P<h>\d{1,2}):(?P<m>\d{2}):(?P<s>\d{2}(?:\.\d+)?)\s*$"
"""How pandas writes a duration in a text."""
_SECONDS = (86_400.0, 3_600.0, 60.0, 1.0)


def read_table(path: Path) -> tuple[pa.Table, Columns, str]:
    """The table with the columns that mean something, what they mean, and what was wrong with a part of it.

    Raises RecordError if it is damaged, or does not say who took how long.
    """
    complaints: list[str] = []
    with path.open("rb") as file:
        parquet = file.read(4) == PARQUET
    try:
        blocks = _of_parquet(path) if parquet else map(_with_durations, _of_text(path, complaints))
        first = next(blocks, None)
        if first is None:
            raise RecordError("a table without rows", where=str(path))
        columns = meaning_of(first.column_names, _text_columns(first))
        if columns.of_one_member and (rank := rank_in(path)) is not None:
            blocks = (_of_rank(block, rank) for block in chain([first], blocks))
            first = next(blocks)
            columns = meaning_of(first.column_names, _text_columns(first))
        if not columns.useful:
            raise RecordError(_why_not(first), where=str(path))
        if columns.alone:
            shown = ", ".join(columns.alone[:_SHOWN])
            complaints.append(f"Moments without the other end of a time, left out: {shown}.")
        table = _united(chain([first], blocks), _used(columns), complaints=complaints)
    except DAMAGE as problem:
        what = "damaged Parquet" if parquet else "damaged table"
        raise RecordError(f"{what}: {str(problem)[:100]}", where=str(path)) from None
    return table, columns, " ".join(complaints)


def _why_not(block: pa.Table) -> str:
    """What keeps a table from saying who took how long."""
    if not meaning_of(block.column_names).useful:
        return "a table without a column for the rank and one for the time"
    return f"a table whose times are no numbers{_first_word(block)}" if block.num_rows else "a table without rows"


def _first_word(block: pa.Table) -> str:
    """The first column that would be of times, and its first cell that is no number."""
    named = meaning_of(block.column_names)
    wanted = _used(named) & {named.whole, *named.phases, *named.ends.values(), *named.members}
    words = set(_text_columns(block))
    name = next((name for name in block.column_names if name in wanted & words), None)
    if name is None:
        return ""
    cells = enumerate(block.column(name).to_pylist(), 1)
    at, cell = next(((at, cell) for at, cell in cells if str(cell or "").strip() and float_of(cell) is None), (0, None))
    return f": column {name}, row {at}: {str(cell)[:_LONGEST_CELL]!r}" if at else f": column {name} is empty"


def _of_rank(block: pa.Table, rank: int) -> pa.Table:
    """The block with a column that says whose it is."""
    return block.append_column(_RANK, pa.repeat(pa.scalar(rank), block.num_rows))


def _used(columns: Columns) -> set[str]:
    """Names of the columns that mean something (and a few words that are no names)."""
    found: set[str] = set()
    for one in fields(columns):
        value = getattr(columns, one.name)
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, dict):
            found.update(word for pair in value.items() for word in pair if isinstance(word, str))
    return found


def _united(blocks: Iterable[pa.Table], used: set[str], *, complaints: list[str]) -> pa.Table:
    """The used columns of the blocks as one table, of MOST_VALUES values at most."""
    kept: list[pa.Table] = []
    rows = 0
    for block in blocks:
        kept.append(block.select([name for name in block.column_names if name in used]))
        rows += block.num_rows
        most = MOST_VALUES // max(1, kept[0].num_columns)
        if rows > most:
            kept[-1] = kept[-1].slice(0, kept[-1].num_rows - (rows - most))
            complaints.append(f"Only the first {most} rows were read.")
            break
    return pa.concat_tables(_of_one_type(kept), promote_options="permissive")


def _of_one_type(blocks: list[pa.Table]) -> list[pa.Table]:
    """The blocks; a column that is numbers in some of them and words in others becomes words in all."""
    types: dict[str, set[pa.DataType]] = {}
    for block in blocks:
        for item in block.schema:
            if not pa.types.is_null(item.type):
                types.setdefault(item.name, set()).add(item.type)
    mixed = {name for name, some in types.items() if len(some) > 1 and not all(map(is_numeric, some))}
    return [_as_words(block, mixed) for block in blocks] if mixed else blocks


def _as_words(block: pa.Table, names: set[str]) -> pa.Table:
    for number, name in enumerate(block.column_names):
        if name in names:
            block = block.set_column(number, name, block.column(name).cast(pa.string()))
    return block


def _of_parquet(path: Path) -> Iterator[pa.Table]:
    """A table without rows, for its names and types, then blocks of rows of the columns that mean something."""
    file = pq.ParquetFile(path)
    flat = [item for item in file.schema_arrow if not pa.types.is_nested(item.type)]
    empty = pa.schema(flat).empty_table()
    yield empty
    used = _used(meaning_of(empty.column_names, _text_columns(empty)))
    names = [name for name in empty.column_names if name in used]
    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=names):
        yield pa.Table.from_batches([batch])


def _of_text(path: Path, complaints: list[str]) -> Iterator[pa.Table]:
    """Blocks of CSV or JSON lines; a JSON document as one block."""
    pieces = _pieces(path, complaints)
    first = next(pieces, b"")
    if first.lstrip()[:1] not in (b"{", b"["):
        yield from _of_csv(chain([first], pieces), complaints)
    elif _is_in_lines(first):
        for piece in chain([first], pieces):
            if rows := _rows(list(several_json(piece))):
                yield _columns_of(rows)
    else:
        content, complete = whole(path, limit=_LONGEST_DOCUMENT)
        if not complete:
            complaints.append("The compressed file is cut off; what was readable was read.")
        yield _columns_of(_document_rows(content, path))


def _with_durations(block: pa.Table) -> pa.Table:
    """The block; words that are durations, as `0 days 00:00:01.5`, are of that type."""
    for number, name in enumerate(block.column_names):
        words = block.column(name)
        if not pa.types.is_string(words.type) or not pc.any(pc.match_substring(words, " day")).as_py():
            continue
        parts = pc.extract_regex(words, pattern=_DURATION).combine_chunks().flatten()
        seconds = [pc.multiply(pc.cast(part, pa.float64()), in_s) for part, in_s in zip(parts, _SECONDS, strict=True)]
        total = pc.add(pc.add(seconds[0], seconds[1]), pc.add(seconds[2], seconds[3]))
        if total.null_count < len(total):
            nanoseconds = pc.cast(pc.round(pc.multiply(total, 1e9)), pa.int64())
            block = block.set_column(number, name, nanoseconds.cast(pa.duration("ns")))
    return block


def _pieces(path: Path, complaints: list[str]) -> Iterator[bytes]:
    """The file in pieces that end with a line."""
    gathered = bytearray()
    with opened(path) as file:
        try:
            while part := file.read1(_PIECE_BYTES):  # type: ignore[attr-defined]
                gathered += part
                end = gathered.rfind(b"\n") + 1 if len(gathered) >= _BLOCK_BYTES else 0
                if end:
                    yield bytes(gathered[:end])
                    del gathered[:end]
                elif len(gathered) > _LONGEST_ROW:
                    complaints.append(f"A line of more than {_LONGEST_ROW >> 20} MiB; what follows was not read.")
                    break
        except (EOFError, gzip.BadGzipFile, zlib.error):
            complaints.append("The compressed file is cut off; what was readable was read.")
    if gathered:
        yield bytes(gathered)


def _is_in_lines(content: bytes) -> bool:
    """Whether each line is an object of its own."""
    lines = content.lstrip().split(b"\n", 2)
    return len(lines) > 1 and lines[0].rstrip(b" \r,").endswith(b"}") and lines[1].lstrip()[:1] == b"{"


def header_of(head: bytes) -> tuple[str, list[str]]:
    """Delimiter and names of the first line that is no comment."""
    for line in head.decode("utf-8-sig", "replace").splitlines()[:20]:
        if line.strip() and not line.startswith("#"):
            delimiter = max(_DELIMITERS[:4], key=line.count)
            if not line.count(delimiter):
                delimiter = " "
            return delimiter, [part.strip().strip('"') for part in line.split(delimiter) if delimiter != " " or part]
    return ",", []


def _of_csv(pieces: Iterator[bytes], complaints: list[str]) -> Iterator[pa.Table]:
    """Blocks of the table; rows with another number of fields are left out and counted."""
    delimiter, bad, skipped, repeated = "", 0, 1, 0
    names: list[str] = []
    header: re.Pattern[str] | None = None
    for piece in pieces:
        if not delimiter:
            delimiter, names = header_of(piece[:65_536])
            names = [name or f"column {number}" for number, name in enumerate(names)]
            names = [name if name not in names[:number] else f"{name} {number}" for number, name in enumerate(names)]
        lines = _plain_lines(piece, delimiter)
        begin = lines.find("\n") + 1 if skipped else 0
        if first := lines[:begin].strip():
            header = re.compile(rf"(?m)^\ufeff?{re.escape(first)}[ \t\r]*(?:\n|\Z)")
        if header is not None:
            rest, again = header.subn("", lines[begin:])
            lines, repeated = lines[:begin] + rest, repeated + again
        if lines.strip() or skipped:
            block, left_out = _csv_block(lines, names, delimiter="\t" if delimiter == " " else delimiter, skip=skipped)
            bad += left_out
            skipped = 0
            yield block
    if repeated:
        complaints.append(f"{repeated} lines that repeat the header were passed over.")
    if bad:
        complaints.append(f"{bad} rows with another number of fields were left out.")


def _plain_lines(piece: bytes, delimiter: str) -> str:
    """The lines without comments and empty ones; fields between spaces are put between tabs."""
    lines = piece.decode("utf-8-sig", "replace")
    if delimiter == " ":
        lines = re.sub(r"[ \t]+", "\t", re.sub(r"(?m)^[ \t]+", "", lines))
    return re.sub(r"(?m)^(?:#[^\n]*|[ \t]*)\n", "", lines)


def _csv_block(lines: str, names: list[str], *, delimiter: str, skip: int) -> tuple[pa.Table, int]:
    """One block, and how many rows were left out of it."""
    bad: list[int] = []

    def leave_out(row: Any) -> str:
        bad.append(row.actual_columns)
        return "skip"

    table = pa_csv.read_csv(
        io.BytesIO(lines.encode()),
        read_options=pa_csv.ReadOptions(column_names=names, skip_rows=skip),
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=leave_out),
    )
    return table, len(bad)


def _document_rows(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Objects in a list, a dictionary of columns, or a dictionary from ranks to lists of times."""
    try:
        value = parsed_json(content)
    except RecordError:
        value = list(several_json(content))
    rows = _rows(value)
    if not rows:
        raise RecordError("JSON without rows", where=str(path))
    return rows


def _columns_of(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as columns: of numbers where there is any number, else of words."""
    rows = [_flat(row) for row in rows]
    names = dict.fromkeys(key for row in rows[:1000] for key in row)
    arrays = {}
    for name in names:
        values = [_scalar(row.get(name)) for row in rows]
        numbers = [float_of(value) for value in values]
        has_numbers = any(number is not None for number in numbers)
        arrays[name] = pa.array(numbers if has_numbers else [None if v is None else str(v) for v in values])
    return pa.table(arrays)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the values of the objects in it, by both names: `timers.forward`."""
    if not any(isinstance(item, dict) for item in row.values()):
        return row
    nested = (
        (f"{key}.{name}", item) for key, inner in row.items() if isinstance(inner, dict) for name, item in inner.items()
    )
    return {key: item for key, item in row.items() if not isinstance(item, dict)} | dict(nested)


def _rows(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
        inner = next((item for item in lists.values() if item and isinstance(item[0], dict)), None)
        if inner is not None:
            value = inner
        elif len(lists) > 1:
            length = max(len(item) for item in lists.values())
            return [
                {**{key: item[at] if at < len(item) else None for key, item in lists.items()}} for at in range(length)
            ]
        else:
            nested = next((item for item in value.values() if isinstance(item, dict)), None)
            return _rows(nested) if nested is not None else [value]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else None


def float_of(value: Any) -> float | None:
    """The number that a value is, None if it is none."""
    try:
        return float(value) if value is not None else None
    except (TypeError, ValueError, OverflowError):
        return None


def _text_columns(table: pa.Table) -> list[str]:
    kinds = {name: table.column(name).type for name in table.column_names}
    return [name for name, kind in kinds.items() if not is_numeric(kind) and not is_duration(kind)]


def is_numeric(kind: pa.DataType) -> bool:
    """Whether values of this type are numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_duration(kind: pa.DataType) -> bool:
    """Whether values of this type are times that say their unit themselves."""
    return bool(pa.types.is_duration(kind))
