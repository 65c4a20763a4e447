"""Small fleets for tests: rows with defaults, as the tables the analyses read. Times are seconds from one origin."""

from __future__ import annotations

import pyarrow as pa

from keepstep.fleet.attempt_arrays import COLUMNS, AttemptArrays, arrays_of
from keepstep.records.fleet_schema import arrow_schema

ORIGIN = 1_700_000_000
TIMES = ("submit", "eligible", "start", "end", "last_seen", "time", "onset")
_FIELDS = {field.name: field.type for name in ("attempts", "attempt_facts") for field in arrow_schema(name)}
ENDINGS = {"node_fail": "failed", "user": "failed"}


def us(seconds):
    return None if seconds is None else round((ORIGIN + seconds) * 1e6)


def attempt(number: int, start: float, end: float | None, **given):
    """One attempt on 8 GPUs; `how` is its ending, or node_fail (infrastructure) or user (its own program)."""
    how = given.pop("how", "completed")
    row = {
        "attempt_id": number,
        "run_id": number,
        "life": 0,
        "job_number": number,
        "submit": start,
        "eligible": start,
        "start": start,
        "end": end,
        "last_seen": start if end is None else end,
        "suspended_us": 0,
        "gpus": 8,
        "node_count": 1,
        "ending": ENDINGS.get(how, how),
        "owner": {"node_fail": "hardware", "user": "user_program"}.get(how, ""),
        "failed": how in ENDINGS,
        "infrastructure": how == "node_fail",
        "independent": how in ENDINGS,
        "victim_of": None,
        "preempted_by": None,
        "cause": how if how in ENDINGS else "",
        "partition": "train",
        "group_key": "",
    }
    return row | given


def attempts(*rows) -> AttemptArrays:
    return arrays_of(joined(*rows))


def joined(*rows) -> pa.Table:
    return table({name: _FIELDS[name] for name in COLUMNS}, rows)


def rows_of(name: str, *rows, extra=("index",)) -> pa.Table:
    """Rows of a table of the schema, and whole-number columns besides."""
    return table({field.name: field.type for field in arrow_schema(name)} | dict.fromkeys(extra, pa.int64()), rows)


def table(fields, rows) -> pa.Table:
    columns = {
        name: pa.array([us(row.get(name)) if name in TIMES else row.get(name) for row in rows], kind)
        for name, kind in fields.items()
    }
    return pa.table(columns)
