"""Tables of step and phase times, one row a rank and step (or a phase of it), or one column a rank: CSV, JSON, Parquet.

Column names are those people use (see column_names). Times without a unit in their name count as seconds where they
look like seconds or milliseconds cannot be told, and are marked as of unknown unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keepstep.errors import RecordError
from keepstep.intake.column_names import Columns, is_member_name, meaning_of, phase_of, rank_in, unit_of
from keepstep.intake.table_files import DAMAGE, PARQUET, float_of, header_of, is_duration, is_numeric, read_table
from keepstep.records.evidence import Evidence, Unread
from keepstep.records.timing_table import TimingTable

__all__ = ["READER", "TimingReader", "without_times"]

_MOST_PHASES = 64
_LARGEST = 2**53
_TICKS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LONGEST_NAME = 60
_SHOWN = 8
_LOOKED_AT = 20
"""Lines of a text that tell whether it is a table."""
_OF_A_LOG = re.compile(r"^\[|[=|]|^0x|:\d|^(?:INFO|WARN(?:ING)?|ERROR|DEBUG)\b")
"""What words of a log line have, and names of columns between spaces do not."""


class TimingReader:
    """Reader of tables of step times."""

    name = "table of step times"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Whether the first line, the keys of the first object or the schema name members and times."""
        if head[:4] == PARQUET:
            try:
                return _says_who(path, meaning_of(pq.read_schema(path).names))
            except DAMAGE:
                return True  # what is wrong with it is for `read` to say
        start = head.lstrip()[:1]
        if start in (b"{", b"["):
            keys = re.findall(rb'"([^"\\\n]{1,60})"\s*:', head[:16_384])
            names = dict.fromkeys(key.decode("utf-8", "replace") for key in keys)
            named = any(map(is_member_name, names)) and bool(meaning_of(names).whole)
            return named or _says_who(path, meaning_of(names))
        return _is_table(head, path)

    def read(self, path: Path) -> Iterator[Evidence]:
        """One TimingTable for each phase. Raises RecordError if the table does not say who took how long."""
        table, columns, complaint = read_table(path)
        if complaint:
            yield Unread(path=str(path), why=complaint)
        try:
            yield from (_by_member if columns.members else _by_row)(table, columns, path=str(path))
        except DAMAGE as problem:
            raise RecordError(f"damaged table: {str(problem)[:100]}", where=str(path)) from None


READER = TimingReader()


def without_times(head: bytes) -> str:
    """What to say of a text whose first line names members, and no column of times; empty if it is no such table."""
    delimiter, names = header_of(head)
    if delimiter == " " or len(names) < 2 or max(map(len, names)) > _LONGEST_NAME or meaning_of(names).useful:
        return ""
    if not any(map(is_member_name, names)) or not _has_numbers_below(head, names, delimiter=delimiter):
        return ""
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return (
        f"a table ({shown}) without a column of times; known are names such as step_time_ms, compute_ms, forward, "
        "backward, data_time, communication, seconds"
    )


def _says_who(path: Path, columns: Columns) -> bool:
    """Whether columns, or the name of the file, say whose times they are."""
    return columns.useful or (columns.of_one_member and rank_in(path) is not None)


def _is_table(head: bytes, path: Path) -> bool:
    """Whether the first line names columns that we need, and the second has as many fields with a number among them."""
    delimiter, names = header_of(head)
    if delimiter == " " and any(_OF_A_LOG.search(name) for name in names):
        return False
    if len(names) < 2 or max(map(len, names)) > _LONGEST_NAME or not _says_who(path, meaning_of(names)):
        return False
    return _has_numbers_below(head, names, delimiter=delimiter)


def _has_numbers_below(head: bytes, names: list[str], *, delimiter: str) -> bool:
    """Whether a line below the names has as many fields, with a number among them; also where there is none below."""
    lines = [line for line in head.decode("utf-8-sig", "replace").splitlines() if line.strip() and line[0] != "#"]
    if len(lines) < 2:
        return len(lines) == 1 and delimiter != " "
    return any(_is_row(line, len(names), delimiter=delimiter) for line in lines[1:_LOOKED_AT])


def _is_row(line: str, width: int, *, delimiter: str) -> bool:
    fields = line.split() if delimiter == " " else line.split(delimiter)
    return len(fields) == width and any(re.fullmatch(r'\s*"?-?[\d.]+(?:e-?\d+)?"?\s*', field) for field in fields)


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column as floats, NaN where it is none; durations in the unit of its name, in seconds if that has none."""
    column = table.column(name)
    if is_duration(column.type):
        counts = pc.cast(pc.cast(column, pa.int64()), pa.float64(), safe=False)
        unit = _TICKS[column.type.unit] / (unit_of(name) or 1.0)
        return np.asarray(counts.to_numpy(), dtype=np.float64) * unit
    if not is_numeric(column.type):
        column = pa.array([float_of(value) for value in column.to_pylist()], type=pa.float64())
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    return np.asarray(pc.cast(column, pa.float64()).to_numpy(), dtype=np.float64)


def _times(table: pa.Table, name: str, *, ends: dict[str, str]) -> np.ndarray:
    """The times of a column, or those from the moment it names to the moment of the column of its end."""
    end = ends.get(name)
    return _numbers(table, name) if end is None else _numbers(table, end) - _numbers(table, name)


def _members(table: pa.Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number of the member of each row, and their names if they are no numbers. `rank-12` and `worker_12` are 12."""
    column = table.column(name)
    if is_numeric(column.type):
        return _numbers(table, name), ()
    words, places = _encoded(column)
    unique = sorted(set(words) - {""})
    numbers = {
        word: re.fullmatch(r"(?:rank|worker|gpu|trainer|process|proc|r|w)?[\s_:#-]*(\d{1,7})(?:\.0)?", word, re.I)
        for word in unique
    }
    if all(numbers.values()):
        number_of = {word: float(match[1]) for word, match in numbers.items() if match is not None}
        return np.array([*(number_of.get(word, np.nan) for word in words), np.nan])[places], ()
    index = {word: float(number) for number, word in enumerate(unique)}
    return np.array([*(index.get(word, np.nan) for word in words), np.nan])[places], tuple(unique)


def _encoded(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The different words of a column, and the index of the word of each row; -1 where there is none."""
    found = pc.dictionary_encode(pc.cast(column, pa.string())).combine_chunks()
    places = found.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return ["" if word is None else word for word in found.dictionary.to_pylist()], places


@dataclass(frozen=True, slots=True)
class _Rows:
    """Who and which step each row is about."""

    who: np.ndarray
    step: np.ndarray
    path: str
    names: tuple[str, ...] = ()
    axes: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    durations: frozenset[str] = frozenset()
    """Columns whose values say their unit themselves."""

    def left_out(self, column: str, seconds: np.ndarray) -> Iterator[Unread]:
        """What is to be said of values of a column that are no times: negative, infinite, or no number at all."""
        known = np.isfinite(self.who) & np.isfinite(self.step)
        bad = known & ((seconds < 0) | np.isinf(seconds))
        good = known & np.isfinite(seconds) & (seconds >= 0)
        if not known.any() or (good.any() and not bad.any()):
            return
        said = f"column {column}: {np.count_nonzero(bad)} of {np.count_nonzero(known)} values are negative or infinite"
        if not good.any():
            said = f"column {column}: none of its {np.count_nonzero(known)} values is a time"
        elif gone := sorted(set(self.who[bad].tolist()) - set(self.who[good].tolist())):
            shown = ", ".join(self.names[int(one)] if self.names else f"{one:.0f}" for one in gone[:_SHOWN])
            said += f"; nothing is left of {shown}" + (", ..." if len(gone) > _SHOWN else "")
        yield Unread(path=self.path, why=f"{said}. They were left out.")

    def timings(self, phase: str, column: str, *, seconds: np.ndarray, chosen: np.ndarray | None = None) -> TimingTable:
        """The table of one phase: `seconds` in the unit that the name of `column` says, of the `chosen` rows."""
        unit = unit_of(column)
        good = np.isfinite(self.who) & np.isfinite(self.step) & np.isfinite(seconds)
        good &= (seconds >= 0) & (np.abs(self.step) < _LARGEST) & (np.abs(self.who) < _LARGEST)
        if chosen is not None:
            good &= chosen
        axes = {axis: np.where(np.isfinite(values), values, -1)[good] for axis, values in self.axes.items()}
        return TimingTable(
            phase=phase,
            who=self.who[good].astype(np.int64),
            step=self.step[good].astype(np.int64),
            seconds=seconds[good] * (unit or 1.0),
            names=self.names,
            unit_known=unit is not None or column in self.durations,
            coordinates={axis: values.astype(np.int64) for axis, values in axes.items()},
            nodes=self.nodes,
            path=self.path,
        )


def _by_row(table: pa.Table, columns: Columns, *, path: str) -> Iterator[TimingTable | Unread]:
    """Tables of the phases, from rows of one member and step each."""
    assert columns.member is not None
    who, names = _members(table, columns.member)
    step = _numbers(table, columns.step) if columns.step else _running_number(who)
    if not np.isfinite(step).any():
        step = _running_number(who)
    nodes = _nodes(table, columns.host, who=who) if columns.host and not names else {}
    axes = {axis: _numbers(table, column) for axis, column in columns.axes.items()}
    rows = _Rows(who, step, path, names, axes, nodes, _durations(table))
    if columns.phase is not None and columns.whole is not None:
        words, said = _encoded(table.column(columns.phase))
        seconds = _times(table, columns.whole, ends=columns.ends)
        yield from rows.left_out(columns.whole, seconds)
        for number, word in enumerate(words[:_MOST_PHASES]):
            phase = "step" if word.lower() in ("step", "total", "iteration", "iter") else phase_of(word) or word[:60]
            yield rows.timings(phase, columns.whole, seconds=seconds, chosen=said == number)
        return
    wanted = ({columns.whole: "step"} if columns.whole else {}) | columns.phases
    for column, phase in wanted.items():
        seconds = _times(table, column, ends=columns.ends)
        yield from rows.left_out(column, seconds)
        yield rows.timings(phase, column, seconds=seconds)


def _durations(table: pa.Table) -> frozenset[str]:
    return frozenset(name for name in table.column_names if is_duration(table.column(name).type))


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


def _by_member(table: pa.Table, columns: Columns, *, path: str) -> Iterator[TimingTable | Unread]:
    step = _numbers(table, columns.step) if columns.step else np.arange(table.num_rows, dtype=np.float64)
    who = np.repeat(np.array(list(columns.members.values()), dtype=np.float64), table.num_rows)
    seconds = np.concatenate([_numbers(table, name) for name in columns.members])
    rows = _Rows(who, np.tile(step, len(columns.members)), path, durations=_durations(table))
    yield from rows.left_out("of a member", seconds)
    yield rows.timings("step", next(iter(columns.members)), seconds=seconds)
