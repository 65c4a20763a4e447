"""From columns of any source to rows of the tables: ids, types, and nothing known written as null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from keepstep.intake.delimited_rows import Aside
from keepstep.intake.local_times import UNKNOWN
from keepstep.records.fleet_schema import TABLES, arrow_schema, empty

__all__ = ["Taken", "finish_attempts", "finish_steps", "mixed", "name_number", "table_of", "taken_rows"]

_MOST = 2**62
_ID_MASK = np.uint64(2**63 - 1)


class Taken(msgspec.Struct, frozen=True):
    """What a piece of a source gave: attempts and steps (or `tables` by name), rows kept aside.

    `gaps` counts local times that do not exist in the zone, `bad_bytes` bytes that were no text.
    """

    attempts: pa.Table | None = None
    steps: pa.Table | None = None
    aside: tuple[Aside, ...] = ()
    gaps: int = 0
    bad_bytes: int = 0
    tables: dict[str, pa.Table] = {}
    notes: tuple[str, ...] = ()


def mixed(*columns: np.ndarray) -> np.ndarray:
    """One 63-bit number for each row of the integer `columns`; the finaliser of splitmix64 after each of them.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    value = np.zeros(len(columns[0]), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            value = value ^ np.asarray(column, dtype=np.int64).view(np.uint64)
            value = value + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return (value & _ID_MASK).view(np.int64)


def name_number(names: Iterable[object]) -> np.ndarray:
    """A 63-bit number for each name, equal for equal names."""
    seen: dict[object, int] = {}
    return np.array(
        [seen[name] if name in seen else seen.setdefault(name, _digest(name) & (2**63 - 1)) for name in names],
        dtype=np.int64,
    )


def _digest(name: object) -> int:
    return int(xxhash.xxh3_64_intdigest(str(name).encode("utf-8", "replace")))


def table_of(name: str, columns: Mapping[str, Any], *, size: int) -> pa.Table:
    """The table `name` from `columns`; columns that are not given are null (texts are empty), UNKNOWN becomes null."""
    schema = arrow_schema(name)
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            empty_text = pa.types.is_string(field.type)
            arrays.append(pa.repeat(pa.scalar("", field.type), size) if empty_text else pa.nulls(size, field.type))
        else:
            arrays.append(_column(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(kind) if values.type != kind else values
    array = np.asarray(values)
    if array.dtype == np.int64:
        unknown = array == UNKNOWN
        if pa.types.is_int32(kind):
            unknown |= np.abs(np.where(unknown, 0, array)) >= 2**31
        return pa.array(np.where(unknown, 0, array), mask=unknown).cast(kind)
    return pa.array(array, type=kind, from_pandas=True)


def finish_attempts(columns: Mapping[str, Any], *, lines: np.ndarray) -> pa.Table:
    """Attempts with their ids. `lines` gives their number; columns as in the schema, without id and source."""
    size = len(lines)
    if not size:
        return empty("attempts")
    number = _numbers(columns, size)
    task, offset = _filled(columns, "array_task", size=size), _filled(columns, "het_offset", size=size)
    job = np.where(task != UNKNOWN, _filled(columns, "array_job", size=size), number)
    job = np.where(offset != UNKNOWN, _filled(columns, "het_job", size=size), job)
    part = np.where(task != UNKNOWN, task + 1, np.where(offset != UNKNOWN, -offset - 1, 0))
    submit, start = _filled(columns, "submit", size=size), _filled(columns, "start", size=size)
    ids = mixed(job, part, np.where(submit == UNKNOWN, 0, submit), np.where(start == UNKNOWN, 0, start))
    return table_of("attempts", {**columns, "attempt_id": ids}, size=size)


def _numbers(columns: Mapping[str, Any], size: int) -> np.ndarray:
    """A number for every job: the scheduler's, or one made from the id."""
    number = _filled(columns, "job_number", size=size)
    unnamed = np.flatnonzero(number == UNKNOWN)
    if len(unnamed):
        number = number.copy()
        written = np.asarray(columns["job_id"], dtype=object)
        number[unnamed] = name_number(written[unnamed])
    return number


def finish_steps(columns: Mapping[str, Any], *, lines: np.ndarray) -> pa.Table:
    """Steps with their ids."""
    size = len(lines)
    if not size:
        return empty("steps")
    start = _filled(columns, "start", size=size)
    ids = mixed(_names(columns["job_id"]), _names(columns["step"]), np.where(start == UNKNOWN, 0, start))
    return table_of("steps", {**columns, "step_id": ids}, size=size)


def _names(column: Any) -> np.ndarray:
    return name_number(column.to_pylist() if isinstance(column, pa.Array | pa.ChunkedArray) else column)


def _filled(columns: Mapping[str, Any], name: str, *, size: int) -> np.ndarray:
    values = columns.get(name)
    return np.full(size, UNKNOWN, dtype=np.int64) if values is None else np.asarray(values, dtype=np.int64)


def taken_rows(table: str, rows: Sequence[Mapping[str, Any]], *, key: tuple[str, ...] = ()) -> pa.Table:
    """Rows given one by one as the table `table`; the first column, if it is an id, is made from the columns of `key`.

    Times are microseconds UTC or None. Rows may have keys that are no columns; they are not looked at.
    """
    if table == "attempts":
        return finish_attempts(_transposed(table, rows), lines=np.arange(len(rows)))
    if table == "steps":
        return finish_steps(_transposed(table, rows), lines=np.arange(len(rows)))
    columns = _transposed(table, rows)
    first = TABLES[table].columns[0]
    if key and rows:
        parts = [name_number(str(row.get(name)) for row in rows) for name in key]
        columns[first.name] = mixed(*parts)
    return table_of(table, columns, size=len(rows))


def _whole(value: Any) -> int:
    """A whole number that fits; UNKNOWN for anything else."""
    if not isinstance(value, int | float) or not abs(value) < _MOST:
        return UNKNOWN
    whole: int = int(value)
    return whole


def _transposed(table: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for column in TABLES[table].columns:
        values = [row.get(column.name) for row in rows]
        if column.kind == "text":
            columns[column.name] = pa.array(["" if value is None else str(value) for value in values], pa.string())
        elif column.kind in ("real", "flag"):
            columns[column.name] = pa.array(values, pa.float64() if column.kind == "real" else pa.bool_())
        else:
            columns[column.name] = np.array([_whole(value) for value in values], np.int64)
    return columns
