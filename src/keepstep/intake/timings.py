"""Tables of step and phase times, one row a rank and step (or a phase of it), or one column a rank: CSV, JSON, Parquet.

Column names are those people use (see column_names). Times without a unit in their name count as seconds where they
look like seconds or milliseconds cannot be told, and are marked as of unknown unit.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from keepstep.errors import RecordError
from keepstep.intake.column_names import Columns, is_member_name, meaning_of, phase_of, unit_of
from keepstep.intake.plain_json import parsed_json, several_json
from keepstep.intake.reading import whole
from keepstep.records.evidence import Evidence, Unread
from keepstep.records.timing_table import TimingTable

__all__ = ["READER", "TimingReader"]

_LONGEST_BYTES = 2 << 30
_MOST_PHASES = 64
_LARGEST_STEP = 2**53
_LONGEST_NAME = 60
_OF_A_LOG = re.compile(r"^\[|[=|]|^0x|:\d|^(?:INFO|WARN(?:ING)?|ERROR|DEBUG)\b")
"""What words of a log line have, and names of columns between spaces do not."""
_PARQUET = b"PAR1"
_DELIMITERS = (",", "\t", ";", "|", " ")
_DAMAGE = (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError, pa.ArrowTypeError, OSError, ValueError)


class TimingReader:
    """Reader of tables of step times."""

    name = "table of step times"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether the first line, the keys of the first object or the schema name members and times."""
        if head[:4] == _PARQUET:
            try:
                return meaning_of(pq.read_schema(path).names).useful
            except _DAMAGE:
                return False
        start = head.lstrip()[:1]
        if start in (b"{", b"["):
            keys = re.findall(rb'"([^"\\\n]{1,60})"\s*:', head[:16_384])
            names = dict.fromkeys(key.decode("utf-8", "replace") for key in keys)
            return meaning_of(names).useful or any(map(is_member_name, names)) and bool(meaning_of(names).whole)
        return _is_table(head)

    def read(self, path: Path) -> Iterator[Evidence]:
        """One TimingTable for each phase. Raises RecordError if the table does not say who took how long."""
        table, complaint = _table(path)
        if complaint:
            yield Unread(path=str(path), why=complaint)
        columns = meaning_of(table.column_names, _text_columns(table))
        if not columns.useful:
            raise RecordError("a table without a column for the rank and one for the time", where=str(path))
        if columns.members:
            yield from _by_member(table, columns, path=str(path))
        else:
            yield from _by_row(table, columns, path=str(path))


READER = TimingReader()


def _is_table(head: bytes) -> bool:
    """Whether the first line names columns that we need, and the second has as many fields with a number among them."""
    delimiter, names = _header(head)
    if delimiter == " " and any(_OF_A_LOG.search(name) for name in names):
        return False
    if len(names) < 2 or max(map(len, names)) > _LONGEST_NAME or not meaning_of(names).useful:
        return False
    lines = [line for line in head.decode("utf-8-sig", "replace").splitlines() if line.strip() and line[0] != "#"]
    if len(lines) < 2:
        return False
    fields = lines[1].split() if delimiter == " " else lines[1].split(delimiter)
    return len(fields) == len(names) and any(re.fullmatch(r'\s*"?-?[\d.]+(?:e-?\d+)?"?\s*', field) for field in fields)


def _table(path: Path) -> tuple[pa.Table, str]:
    """The table, and what was wrong with a part of it (empty: nothing)."""
    with path.open("rb") as file:
        head = file.read(4)
    if head == _PARQUET:
        try:
            return pq.read_table(path), ""
        except _DAMAGE as problem:
            raise RecordError(f"damaged Parquet: {str(problem)[:100]}", where=str(path)) from None
    content, complete = whole(path, limit=_LONGEST_BYTES)
    complaint = "" if complete else "the compressed file is cut off; what was readable was read"
    if content.lstrip()[:1] in (b"{", b"["):
        return _from_json(content, path), complaint
    return _from_csv(content, path, complaint=complaint)


def _header(head: bytes) -> tuple[str, list[str]]:
    """Delimiter and names of the first line that is no comment."""
    for line in head.decode("utf-8-sig", "replace").splitlines()[:20]:
        if line.strip() and not line.startswith("#"):
            delimiter = max(_DELIMITERS[:4], key=line.count)
            if not line.count(delimiter):
                delimiter = " "
            return delimiter, [part.strip().strip('"') for part in line.split(delimiter) if delimiter != " " or part]
    return ",", []


def _from_csv(content: bytes, path: Path, *, complaint: str) -> tuple[pa.Table, str]:
    """The table; rows with another number of fields are left out and counted."""
    delimiter, names = _header(content[:65_536])
    bad: list[int] = []

    def leave_out(row: Any) -> str:
        bad.append(row.actual_columns)
        return "skip"

    lines = content.decode("utf-8-sig", "replace")
    if delimiter == " ":
        lines, delimiter = re.sub(r"[ \t]+", "\t", re.sub(r"(?m)^[ \t]+", "", lines)), "\t"
    lines = re.sub(r"(?m)^(?:#[^\n]*|[ \t]*)\n", "", lines)
    names = [name or f"column {number}" for number, name in enumerate(names)]
    names = [name if name not in names[:number] else f"{name} {number}" for number, name in enumerate(names)]
    try:
        table = pa_csv.read_csv(
            io.BytesIO(lines.encode()),
            read_options=pa_csv.ReadOptions(column_names=names, skip_rows=1),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=leave_out),
        )
    except _DAMAGE as problem:
        raise RecordError(f"damaged table: {str(problem)[:100]}", where=str(path)) from None
    if bad:
        complaint = f"{len(bad)} rows with another number of fields were left out. {complaint}".strip()
    return table, complaint


def _from_json(content: bytes, path: Path) -> pa.Table:
    """Objects in a list (or one a line), a dictionary of columns, or a dictionary from ranks to lists of times."""
    try:
        value = parsed_json(content)
    except RecordError:
        value = list(several_json(content))
    rows = _rows(value)
    if not rows:
        raise RecordError("JSON without rows", where=str(path))
    names = dict.fromkeys(key for row in rows[:1000] for key in row)
    columns = {name: [_scalar(row.get(name)) for row in rows] for name in names}
    arrays = {}
    for name, values in columns.items():
        numbers = [_float(value) for value in values]
        use = (
            numbers
            if any(number is not None for number in numbers)
            else [None if v is None else str(v) for v in values]
        )
        arrays[name] = pa.array(use)
    return pa.table(arrays)


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


def _float(value: Any) -> float | None:
    try:
        return float(value) if value is not None else None
    except (ValueError, OverflowError):
        return None


def _text_columns(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if not _numeric(table.column(name).type)]


def _numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as floats, NaN where it is none."""
    column = table.column(name)
    if not _numeric(column.type):
        column = pa.array([_float(value) for value in column.to_pylist()], type=pa.float64())
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    return np.asarray(pc.cast(column, pa.float64()).to_numpy(), dtype=np.float64)


def _members(table: pa.Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number of the member of each row, and their names if they are no numbers. `rank-12` and `worker_12` are 12."""
    column = table.column(name)
    if _numeric(column.type):
        return _numbers(table, name), ()
    words = ["" if value is None else str(value) for value in column.to_pylist()]
    unique = sorted(set(words) - {""})
    numbers = {
        word: re.fullmatch(r"(?:rank|worker|gpu|trainer|process|proc|r|w)?[\s_:#-]*(\d{1,7})", word, re.I)
        for word in unique
    }
    if all(numbers.values()):
        number_of = {word: float(match[1]) for word, match in numbers.items() if match is not None}
        return np.array([number_of.get(word, np.nan) for word in words]), ()
    index = {word: float(number) for number, word in enumerate(unique)}
    return np.array([index.get(word, np.nan) for word in words]), tuple(unique)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Who and which step each row is about."""

    who: np.ndarray
    step: np.ndarray
    path: str
    names: tuple[str, ...] = ()
    axes: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)

    def timings(self, phase: str, column: str, *, seconds: np.ndarray, chosen: np.ndarray | None = None) -> TimingTable:
        """The table of one phase: `seconds` in the unit that the name of `column` says, of the `chosen` rows."""
        unit = unit_of(column)
        good = np.isfinite(self.who) & np.isfinite(self.step) & np.isfinite(seconds)
        good &= (seconds >= 0) & (np.abs(self.step) < _LARGEST_STEP)
        if chosen is not None:
            good &= chosen
        axes = {axis: np.where(np.isfinite(values), values, -1)[good] for axis, values in self.axes.items()}
        return TimingTable(
            phase=phase,
            who=self.who[good].astype(np.int64),
            step=self.step[good].astype(np.int64),
            seconds=seconds[good] * (unit or 1.0),
            names=self.names,
            unit_known=unit is not None,
            coordinates={axis: values.astype(np.int64) for axis, values in axes.items()},
            nodes=self.nodes,
            path=self.path,
        )


def _by_row(table: pa.Table, columns: Columns, *, path: str) -> Iterator[TimingTable]:
    """Tables of the phases, from rows of one member and step each."""
    assert columns.member is not None
    who, names = _members(table, columns.member)
    step = _numbers(table, columns.step) if columns.step else _running_number(who)
    if not np.isfinite(step).any():
        step = _running_number(who)
    nodes = _nodes(table, columns.host, who=who) if columns.host and not names else {}
    axes = {axis: _numbers(table, column) for axis, column in columns.axes.items()}
    rows = _Rows(who, step, path, names, axes, nodes)
    if columns.phase is not None and columns.whole is not None:
        said = np.array([str(value) for value in table.column(columns.phase).to_pylist()])
        seconds = _numbers(table, columns.whole)
        for word in list(dict.fromkeys(said.tolist()))[:_MOST_PHASES]:
            phase = "step" if word.lower() in ("step", "total", "iteration", "iter") else phase_of(word) or word[:60]
            yield rows.timings(phase, columns.whole, seconds=seconds, chosen=said == word)
        return
    wanted = ({columns.whole: "step"} if columns.whole else {}) | columns.phases
    for column, phase in wanted.items():
        yield rows.timings(phase, column, seconds=_numbers(table, column))


def _nodes(table: pa.Table, name: str, *, who: np.ndarray) -> dict[int, str]:
    """The host of each member; of one that moved, the last."""
    said = table.column(name).combine_chunks().dictionary_encode()
    words = said.dictionary.to_pylist()
    hosts = [f"{word:g}" if isinstance(word, float) else str("" if word is None else word) for word in words]
    place = np.asarray(pc.fill_null(said.indices, -1).to_numpy(zero_copy_only=False))
    known = np.isfinite(who) & (place >= 0)
    members, newest = np.unique(who[known][::-1], return_index=True)
    places = place[known][::-1][newest]
    return {int(member): hosts[at] for member, at in zip(members.tolist(), places.tolist(), strict=True) if hosts[at]}


def _running_number(who: np.ndarray) -> np.ndarray:
    """Number of each row among those of its member: the step, where the table has none."""
    order = np.argsort(who, kind="stable")
    ordered = who[order]
    first = np.searchsorted(ordered, ordered, side="left")
    number = np.empty(len(who))
    number[order] = np.arange(len(who)) - first
    return number


def _by_member(table: pa.Table, columns: Columns, *, path: str) -> Iterator[TimingTable]:
    step = _numbers(table, columns.step) if columns.step else np.arange(table.num_rows, dtype=np.float64)
    who = np.repeat(np.array(list(columns.members.values()), dtype=np.float64), table.num_rows)
    seconds = np.concatenate([_numbers(table, name) for name in columns.members])
    rows = _Rows(who, np.tile(step, len(columns.members)), path)
    yield rows.timings("step", next(iter(columns.members)), seconds=seconds)
