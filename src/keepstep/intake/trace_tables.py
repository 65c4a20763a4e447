"""CSV of public traces and of tables of our own: told by their columns, read into attempts, figures or rows.

Acme (InternLM/AcmeTrace) and Helios (S-Lab) print local times with an offset or without; openb (Alibaba) and PAI
print seconds from an unknown origin, which stay counted from 1970; `cluster_summary` of Acme has figures only.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import MAX_COLUMNS, Aside
from keepstep.intake.local_times import UNKNOWN, moments
from keepstep.records.fleet_schema import TABLES

__all__ = ["read_trace", "trace_header"]

_BATCH = 50_000
_MAX_FIELD = 1 << 20
_SECOND_US = 1_000_000
_STATES = {
    "COMPLETED": "COMPLETED",
    "SUCCEEDED": "COMPLETED",
    "PASS": "COMPLETED",
    "TERMINATED": "COMPLETED",
    "CANCELLED": "CANCELLED",
    "CANCELED": "CANCELLED",
    "KILLED": "CANCELLED",
    "FAILED": "FAILED",
    "FAIL": "FAILED",
    "TIMEOUT": "TIMEOUT",
    "NODE_FAIL": "NODE_FAIL",
    "NODE FAIL": "NODE_FAIL",
    "OUT_OF_MEMORY": "OUT_OF_MEMORY",
    "PREEMPTED": "PREEMPTED",
    "RUNNING": "RUNNING",
    "PENDING": "PENDING",
    "WAITING": "PENDING",
}
_ALIASES = {
    "job_id": ("job_id", "jobid", "job_name", "name", "id"),
    "user": ("user", "user_id"),
    "partition": ("vc", "partition", "cluster_partition", "qos_partition"),
    "gpus": ("gpu_num", "gpus", "num_gpu", "plan_gpu_total"),
    "cpus": ("cpu_num", "cpu_num_req", "cpu_milli"),
    "node_count": ("node_num", "nodes_num", "num_node"),
    "state": ("state", "status", "pod_phase"),
    "submit": ("submit_time", "submitted_time", "creation_time"),
    "start": ("start_time", "scheduled_time"),
    "end": ("end_time", "deletion_time", "fail_time"),
    "kind": ("type", "job_type", "workload"),
}
_TABLES_OF_OUR_OWN = ("policy_modes", "progress", "node_intervals", "health_results", "capacity")


def trace_header(line: str) -> bool:
    """Whether `line` is the header of a trace this module reads."""
    names = _names(line)
    return _is_summary(names) or _own_table(names) is not None or _is_jobs(names)


def _names(line: str) -> list[str]:
    return [name.strip().strip('"').lower() for name in line.removeprefix("\ufeff").split(",")]


def _is_summary(names: list[str]) -> bool:
    return names[0] == "id" and "job_num" in names


def _own_table(names: list[str]) -> str | None:
    """The table of ours whose columns these are."""
    for table in _TABLES_OF_OUR_OWN:
        columns = {column.name for column in TABLES[table].columns}
        needed = {"policy_modes": {"mode", "start"}, "progress": {"job", "time"}}.get(table, {"node"})
        if len(names) > 1 and set(names) <= columns and needed <= set(names):
            return table
    return None


def _is_jobs(names: list[str]) -> bool:
    found = _mapping(names)
    return len(names) > 3 and {"job_id", "state", "start", "end"} <= set(found) and "," not in names


def _mapping(names: list[str]) -> dict[str, int]:
    """For each of our columns the place of theirs."""
    return {
        ours: names.index(theirs)
        for ours, all_theirs in _ALIASES.items()
        for theirs in [next((name for name in all_theirs if name in names), "")]
        if theirs
    }


def read_trace(stream: BinaryIO, *, zone: str, cluster: str, where: str) -> Iterator[Taken]:
    """What a CSV says. Raises RecordError if its columns are those of no trace known here."""
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline="")
    header = text.readline(1 << 16)
    names = _names(header.strip())
    if len(names) > MAX_COLUMNS:
        raise RecordError(f"{len(names)} columns, at most {MAX_COLUMNS} are read", where=where)
    if not trace_header(header.strip()):
        raise RecordError("columns of no trace known here", where=where)
    csv.field_size_limit(_MAX_FIELD)
    for rows, first, aside in _batches(text, len(names)):
        if _is_summary(names):
            yield _summary(rows, names, aside=aside)
        elif (table := _own_table(names)) is not None:
            yield _own(table, rows, names=names, zone=zone, first=first, aside=aside)
        else:
            yield _jobs(rows, names, zone=zone, cluster=cluster, first=first, aside=aside)


def _batches(text: io.TextIOWrapper, width: int) -> Iterator[tuple[list[list[str]], list[int], list[Aside]]]:
    """Rows of the right width, their lines, and what is not a row."""
    reader = csv.reader(text)
    rows: list[list[str]] = []
    lines: list[int] = []
    aside: list[Aside] = []
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            aside.append(Aside(reader.line_num + 1, f"no CSV: {error}", ""))
            continue
        if len(row) == width:
            rows.append(row)
            lines.append(reader.line_num + 1)
        elif row:
            aside.append(
                Aside(reader.line_num + 1, f"{len(row)} fields where {width} are expected", ",".join(row)[:200])
            )
        if len(rows) >= _BATCH:
            yield rows, lines, aside
            rows, lines, aside = [], [], []
    yield rows, lines, aside


def _summary(rows: list[list[str]], names: list[str], *, aside: list[Aside]) -> Taken:
    figures = []
    for row in rows:
        for name, cell in zip(names[1:], row[1:], strict=True):
            try:
                figures.append({"cluster": row[0], "figure": name, "value": float(cell)})
            except ValueError:
                continue  # an empty cell: the cluster does not have the figure
    return Taken(aside=tuple(aside), tables={"summaries": taken_rows("summaries", figures)})


def _times(cells: list[str], zone: str) -> np.ndarray:
    """Times of a trace: as schedulers print them, or seconds from an unknown origin (also 0)."""
    cleaned = [cell.strip().replace(" ", "T", 1) if "-" in cell[1:] and " " in cell else cell.strip() for cell in cells]
    found = moments(pa.chunked_array([pa.array(cleaned, pa.string())]), zone).early
    for index, cell in enumerate(cleaned):
        if found[index] == UNKNOWN and cell and cell[0].isdigit() and "-" not in cell:
            try:
                found[index] = round(float(cell) * _SECOND_US)
            except (ValueError, OverflowError):
                continue
    return found


def _whole(cell: str) -> int | None:
    try:
        return int(float(cell))
    except (ValueError, OverflowError):
        return None


def _jobs(
    rows: list[list[str]], names: list[str], *, zone: str, cluster: str, first: list[int], aside: list[Aside]
) -> Taken:
    place = _mapping(names)
    times = {
        name: _times([row[place[name]] for row in rows], zone) if name in place else np.full(len(rows), UNKNOWN)
        for name in ("submit", "start", "end")
    }
    attempts = []
    for index, row in enumerate(rows):
        cells = {name: row[at] for name, at in place.items()}
        state = _STATES.get(cells["state"].strip().upper())
        start, end, submit = (int(times[name][index]) for name in ("start", "end", "submit"))
        wrong = "" if state else f"no state known here: {cells['state'][:40]!r}"
        if start != UNKNOWN and end != UNKNOWN and end < start:
            wrong = "the end is before the start"
        if wrong:
            aside.append(Aside(first[index], wrong, ",".join(row)[:200]))
            continue
        running = state in ("RUNNING", "PENDING")
        attempts.append(
            _attempt(cells, state or "", cluster=cluster, times=(submit, start, UNKNOWN if running else end))
        )
    return Taken(taken_rows("attempts", attempts), None, tuple(aside))


def _attempt(cells: dict[str, str], state: str, *, cluster: str, times: tuple[int, int, int]) -> dict[str, Any]:
    submit, start, end = (None if time == UNKNOWN else time for time in times)
    gpus = _whole(cells.get("gpus", ""))
    return {
        "cluster": cluster,
        "job_id": cells["job_id"],
        "job_number": _whole(cells["job_id"]) if cells["job_id"].isdigit() else None,
        "name": cells.get("kind", ""),
        "user": cells.get("user", ""),
        "partition": cells.get("partition", ""),
        "state": state,
        "submit": submit,
        "eligible": submit,
        "start": start,
        "end": end,
        "last_seen": end,
        "gpus": gpus,
        "gpus_asked": gpus,
        "cpus": _whole(cells.get("cpus", "")),
        "node_count": _whole(cells.get("node_count", "")),
    }


def _own(
    table: str, rows: list[list[str]], *, names: list[str], zone: str, first: list[int], aside: list[Aside]
) -> Taken:
    """Rows of a table of ours, written by a site's own script."""
    kinds = {column.name: column.kind for column in TABLES[table].columns}
    columns: dict[str, Any] = {}
    for index, name in enumerate(names):
        cells = [row[index] for row in rows]
        if kinds[name] == "time":
            columns[name] = [None if time == UNKNOWN else int(time) for time in _times(cells, zone)]
        elif kinds[name] == "text":
            columns[name] = cells
        elif kinds[name] == "real":
            columns[name] = [float(cell) if cell else None for cell in cells]
        else:
            columns[name] = [_whole(cell) for cell in cells]
    records = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    time = "time" if "time" in kinds else "start"
    good = [record for record in records if record.get(time) is not None]
    lost = [i for i, record in enumerate(records) if record.get(time) is None]
    aside += [Aside(first[i], f"no time in {time}", ",".join(rows[i])[:200]) for i in lost]
    key = {"node_intervals": ("node", "start"), "health_results": ("node", "check", "device", "time")}.get(table, ())
    return Taken(aside=tuple(aside), tables={table: taken_rows(table, good, key=key)})
