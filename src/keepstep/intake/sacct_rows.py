"""Rows of `sacct -P` as attempts and steps, column by column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keepstep.intake.attempt_columns import Taken, finish_attempts, finish_steps
from keepstep.intake.delimited_rows import Aside, RowBlock
from keepstep.intake.local_times import UNKNOWN, Moments, choose, moments
from keepstep.intake.sacct_values import duration_us, exit_of, gpus_of, group_of, number_of, state_of

__all__ = ["sacct_taken"]

_COMMENT_LETTERS = 1000
_NO_HOSTS = ["None assigned", "Unknown", "(null)", "None"]
_SECOND_US = 1_000_000
_MOST_DIGITS, _MOST_ID_DIGITS = 12, 18
_PARTS = (
    r"^(?P<job>(?P<number>\d{1,18})(?:_(?:(?P<task>\d{1,17})|\[[^\]]*\]))?(?:\+(?P<offset>\d{1,8}))?)"
    r"(?:\.(?P<step>.+))?$"
)
"""A job id with its parts; `1234_[5-9]` stands for tasks that wait."""
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING")


def sacct_taken(block: RowBlock, *, zone: str, cluster: str) -> Taken:
    """Attempts and steps in `block`; rows whose id, state or times make no sense go aside.

    `zone` is the time zone the times were printed in, `cluster` the name where the rows do not say it.
    """
    rows = _Rows(block, cluster)
    ids = _ids(rows)
    state, by = rows.pairs("state", state_of, default=("", ""))
    good = rows.keep(ids["number"] != UNKNOWN, "no job id", column=rows.id_column)
    good &= rows.keep(state != "", "no state of Slurm", column="state", among=good)
    times = _times(rows, zone)
    for name, moment in times.read.items():
        good &= rows.keep(~moment.wrong, f"no time in {name}", column=name, among=good)
    good &= rows.keep(times.ordered, "the end is before the start", column="end", among=good)
    good &= rows.keep(times.lengths, "negative duration", column=rows.length_column, among=good)
    columns = _columns(rows, times=times, ids=ids, states=(state, by))
    step = ids["step"]
    attempts = finish_attempts(_pick(columns, good & ~step), lines=block.lines[good & ~step])
    steps = finish_steps(_pick(columns, good & step), lines=block.lines[good & step])
    gaps = sum(int(moment.gap.sum()) for moment in times.read.values())
    return Taken(attempts, steps, (*block.aside, *rows.aside), gaps, block.bad_bytes)


class _Rows:
    """The columns of a block by name, with what goes aside."""

    def __init__(self, block: RowBlock, cluster: str) -> None:
        self.block = block
        self.cluster = cluster
        self.size = block.rows.num_rows
        self.aside: list[Aside] = []
        self.id_column = "jobid" if "jobid" in block.rows.column_names else "jobidraw"
        self.length_column = "elapsedraw" if "elapsedraw" in block.rows.column_names else "elapsed"

    def text(self, name: str) -> pa.Array:
        """A column as text; empty strings where the export lacks it."""
        if name not in self.block.rows.column_names:
            return pa.repeat(pa.scalar("", pa.string()), self.size)
        column = self.block.rows.column(name).combine_chunks()
        return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column

    def pairs(
        self, name: str, function: Callable[[str], tuple[Any, Any] | None], *, default: tuple[Any, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`function` of each value as two columns, `default` for None; called once for each different value."""
        encoded = self.text(name).dictionary_encode()
        found = [function(value.strip()) or default for value in encoded.dictionary.to_pylist()] or [default]
        codes = np.asarray(encoded.indices)
        kind = object if isinstance(default[0], str) else np.int64
        return tuple(np.array([pair[side] for pair in found], dtype=kind)[codes] for side in (0, 1))

    def words(self, name: str, function: Callable[[str], str]) -> np.ndarray:
        """`function` of each value; called once for each different value."""
        return self.pairs(name, lambda value: (function(value), ""), default=("", ""))[0]

    def numbers(self, name: str, function: Callable[[str], int | None] = number_of, *, unit: int = 1) -> np.ndarray:
        """A column of numbers; UNKNOWN where there is none. Plain digits count `unit` each, the rest `function`."""
        if name not in self.block.rows.column_names:
            return np.full(self.size, UNKNOWN, dtype=np.int64)
        text = self.text(name)
        plain = pc.and_(pc.ascii_is_decimal(text), pc.less_equal(pc.binary_length(text), _MOST_DIGITS))
        digits = pc.if_else(plain, text, None).cast(pa.int64())
        values = np.array(pc.fill_null(digits, UNKNOWN))
        np.multiply(values, unit, out=values, where=values != UNKNOWN)
        rest = np.flatnonzero(~np.asarray(plain))
        if len(rest):
            encoded = text.take(pa.array(rest)).dictionary_encode()
            found = [function(value.strip()) for value in encoded.dictionary.to_pylist()]
            mapped = np.array([UNKNOWN if value is None else value for value in found], dtype=np.int64)
            values[rest] = mapped[np.asarray(encoded.indices)]
        return values

    def keep(self, fine: np.ndarray, reason: str, *, column: str, among: np.ndarray | None = None) -> np.ndarray:
        """`fine`; rows of `among` that are not go aside with `reason` and the value of `column`."""
        bad = ~fine if among is None else ~fine & among
        for index in np.flatnonzero(bad):
            value = self.text(column)[index].as_py() if column in self.block.rows.column_names else ""
            row = "|".join(str(cell) for cell in self.block.rows.slice(index, 1).to_pylist()[0].values())
            self.aside.append(Aside(int(self.block.lines[index]), f"{reason}: {value[:60]!r}", row[:200]))
        return fine


def _ids(rows: _Rows) -> dict[str, Any]:
    """Parts of the job ids: number, task, offset (UNKNOWN: none), whether a step, its name, and the id as written."""
    text = rows.text(rows.id_column)
    size = rows.size
    found: dict[str, Any] = {name: np.full(size, UNKNOWN, dtype=np.int64) for name in ("number", "task", "offset")}
    found["step"] = np.zeros(size, dtype=bool)
    found["step_name"] = np.full(size, "", dtype=object)
    plain = np.asarray(pc.and_(pc.ascii_is_decimal(text), pc.less_equal(pc.binary_length(text), _MOST_ID_DIGITS)))
    places = np.flatnonzero(plain)
    if len(places) == size:
        found["written"], found["number"] = text, np.array(text.cast(pa.int64()))
    else:
        found["written"] = np.asarray(text.to_numpy(zero_copy_only=False), dtype=object)
        found["number"][places] = np.asarray(text.take(pa.array(places)).cast(pa.int64()))
        _fill_ids(text, np.flatnonzero(~plain), found=found)
    raw = rows.numbers("jobidraw", lambda value: number_of(value.split(".")[0].split("+")[0].split("_")[0]))
    found["raw"] = np.where(raw == UNKNOWN, found["number"], raw)
    return found


def _fill_ids(text: pa.Array, places: np.ndarray, *, found: dict[str, Any]) -> None:
    """The parts of the ids at `places`, which are not plain numbers."""
    parts = pc.extract_regex(pc.utf8_trim_whitespace(text.take(pa.array(places))), _PARTS)
    matched = np.asarray(parts.is_valid())
    for name in ("number", "task", "offset"):
        digits = pc.struct_field(parts, name)
        digits = pc.if_else(pc.equal(digits, ""), None, digits).cast(pa.int64())
        found[name][places] = np.asarray(pc.fill_null(digits, UNKNOWN))
    steps = pc.fill_null(pc.struct_field(parts, "step"), "")
    found["step"][places] = np.asarray(pc.not_equal(steps, ""))
    found["step_name"][places] = steps.to_numpy(zero_copy_only=False)
    whole = pc.fill_null(pc.struct_field(parts, "job"), "")
    found["written"][places] = whole.to_numpy(zero_copy_only=False)
    found["number"][places[~matched]] = UNKNOWN


class _Times(msgspec.Struct):
    read: dict[str, Moments]
    start: np.ndarray
    end: np.ndarray
    submit: np.ndarray
    eligible: np.ndarray
    length: np.ndarray
    suspended: np.ndarray
    ordered: np.ndarray
    lengths: np.ndarray
    note: np.ndarray


def _times(rows: _Rows, zone: str) -> _Times:
    """All times of the rows, in UTC, with repeated hours resolved and what is odd noted."""
    read = {name: moments(rows.text(name), zone) for name in ("submit", "eligible", "start", "end")}
    length = rows.numbers("elapsedraw", lambda _: None, unit=_SECOND_US)
    length = np.where(length == UNKNOWN, rows.numbers("elapsed", duration_us, unit=_SECOND_US), length)
    negative = np.asarray(pc.starts_with(rows.text("elapsedraw"), "-"))
    negative |= np.asarray(pc.starts_with(rows.text("elapsed"), "-"))
    suspended = np.maximum(rows.numbers("suspended", duration_us, unit=_SECOND_US), 0)
    total = np.where(length == UNKNOWN, UNKNOWN, length + suspended)
    start, end = choose(read["start"], read["end"], length_us=total)
    known = (start != UNKNOWN) & (end != UNKNOWN)
    ordered = ~known | (end >= start)
    odd = known & ordered & (total != UNKNOWN) & (np.abs(end - start - total) > 2 * _SECOND_US)
    note = np.full(rows.size, "", dtype=object)
    for index in np.flatnonzero(odd):
        spans = f"end - start is {(end[index] - start[index]) // _SECOND_US} s"
        note[index] = f"{spans}, the scheduler counted {total[index] // _SECOND_US} s"
    submit, eligible = _before(read["submit"], start), _before(read["eligible"], start)
    late = (submit != UNKNOWN) & (start != UNKNOWN) & (submit > start)
    note[late & (note == "")] = "submitted after the start"
    return _Times(read, start, end, submit, eligible, length, suspended, ordered, ~negative, note)


def _before(moment: Moments, start: np.ndarray) -> np.ndarray:
    """The reading of `moment` that is not after `start`, the earlier of two that are not."""
    fits = (start != UNKNOWN) & (moment.early > start) & (moment.late <= start)
    return np.where(fits, moment.late, moment.early)


def _columns(
    rows: _Rows, *, times: _Times, ids: dict[str, Any], states: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """Columns of attempts and steps, UNKNOWN or empty where not known."""
    cluster = rows.text("cluster")
    if rows.cluster:
        cluster = pc.if_else(pc.equal(cluster, ""), rows.cluster, cluster)
    state, by = states
    code, signal = rows.pairs("exitcode", exit_of, default=(UNKNOWN, UNKNOWN))
    derived_code, derived_signal = rows.pairs("derivedexitcode", exit_of, default=(UNKNOWN, UNKNOWN))
    hosts, cpus = rows.text("nodelist"), rows.numbers("ncpus")
    array, het = ids["task"] != UNKNOWN, ids["offset"] != UNKNOWN
    running = np.isin(state, _RUNNING)
    ran = np.where((times.start != UNKNOWN) & (times.length != UNKNOWN), times.start + times.length, UNKNOWN)
    return {
        "cluster": cluster,
        "job_id": ids["written"],
        "job_number": ids["raw"],
        "array_job": np.where(array, ids["number"], UNKNOWN),
        "array_task": ids["task"],
        "het_job": np.where(het, ids["number"], UNKNOWN),
        "het_offset": ids["offset"],
        "step": ids["step_name"],
        "state": state,
        "cancelled_by": by,
        "exit_code": code,
        "exit_signal": signal,
        "derived_code": derived_code,
        "derived_signal": derived_signal,
        "submit": times.submit,
        "eligible": times.eligible,
        "start": times.start,
        "end": np.where(running, UNKNOWN, times.end),
        "last_seen": np.where(running | (times.end == UNKNOWN), ran, times.end),
        "suspended_us": times.suspended,
        "timelimit_us": _limits(rows),
        "gpus": rows.numbers("alloctres", gpus_of),
        "gpus_asked": rows.numbers("reqtres", gpus_of),
        "node_count": rows.numbers("nnodes"),
        "cpus": np.where(cpus == UNKNOWN, rows.numbers("alloccpus"), cpus),
        "nodes": pc.if_else(pc.is_in(hosts, value_set=pa.array(_NO_HOSTS)), "", hosts),
        "restarts": rows.numbers("restarts"),
        "priority": rows.numbers("priority"),
        "comment": pc.utf8_slice_codeunits(rows.text("comment"), 0, _COMMENT_LETTERS),
        "group_key": rows.words("comment", group_of),
        "time_note": times.note,
        **{
            ours: rows.text(theirs)
            for ours, theirs in (
                ("name", "jobname"),
                ("user", "user"),
                ("account", "account"),
                ("partition", "partition"),
                ("qos", "qos"),
                ("failed_node", "failednode"),
                ("reason", "reason"),
            )
        },
    }


def _limits(rows: _Rows) -> np.ndarray:
    raw = rows.numbers("timelimitraw", lambda _: None, unit=60 * _SECOND_US)
    return np.where(raw == UNKNOWN, rows.numbers("timelimit", duration_us), raw)


def _pick(columns: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """The rows of `mask` of every column."""
    if mask.all():
        return columns
    chosen = pa.array(mask)
    return {
        name: values.filter(chosen) if isinstance(values, pa.Array | pa.ChunkedArray) else values[mask]
        for name, values in columns.items()
    }
