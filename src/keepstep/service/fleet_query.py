"""`keepstep fleet query`: SQL over the tables, and the whole story of one incident in one call."""

from __future__ import annotations

import csv
import datetime
import io
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from keepstep.errors import UsageError
from keepstep.fleet.incident_story import IncidentStory, story_of, story_text
from keepstep.service.fleet_derive import current

__all__ = ["MAX_ROWS", "Answer", "answer_text", "incident_answer", "incident_list", "sql_answer", "story_answer"]

MAX_ROWS = 100_000
_WIDTH = 60


class Answer(msgspec.Struct, frozen=True):
    """The rows of a query. `more` says that it had more than were read."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool


def sql_answer(directory: Path, query: str, *, limit: int = 1000) -> Answer:
    """The first `limit` rows of one SELECT over the tables.

    Raises UsageError, with what DuckDB says, for a query that is wrong or would do anything but read the tables.
    """
    connection = current(directory).connection()
    limit = max(1, min(limit, MAX_ROWS))
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            raise UsageError("one statement at a time", remedy="SELECT ... FROM attempts")
        if statements[0].type.name not in ("SELECT", "EXPLAIN"):
            raise UsageError("the tables are only read", remedy="SELECT ... FROM attempts")
        result = connection.execute(statements[0])
        columns = tuple(str(column[0]) for column in result.description or ())
        rows = result.fetchmany(limit + 1)
    except duckdb.Error as error:
        first = str(error).strip().splitlines()[0][:300]
        raise UsageError(first, remedy="tables and columns: docs/fleet.md, or: SHOW TABLES") from error
    return Answer(columns, tuple(tuple(map(_plain, row)) for row in rows[:limit]), len(rows) > limit)


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def incident_answer(directory: Path, which: str) -> IncidentStory:
    """What is known about incident `which`: an incident_id, JOB:NUMBER, or the id of a failed job.

    Raises UsageError if nothing of that name is there.
    """
    return story_of(current(directory).connection(), which)


def incident_list(directory: Path) -> Answer:
    """All incidents and failures that can be asked about, newest first."""
    return sql_answer(
        directory,
        """
        SELECT CASE WHEN number > 0 THEN concat(job, ':', number) ELSE CAST(incident_id AS VARCHAR) END AS which,
                kind, onset AS "when", node, op AS waited FROM incidents
        UNION ALL
        SELECT a.job_id, f.cause, a."end", coalesce(e.nodes, a.failed_node), ''
        FROM attempt_facts f JOIN attempts a USING (attempt_id) LEFT JOIN failure_events e ON f.event_id = e.event_id
        WHERE f.failed
        ORDER BY "when" DESC NULLS LAST, which LIMIT 200
        """,
        limit=200,
    )


def answer_text(answer: Answer, *, style: str) -> str:
    """The rows as `text` (a table), `csv` or `json`."""
    if style == "json":
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
        return msgspec.json.encode({"rows": rows, "more": answer.more}).decode()
    if style == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows(answer.rows)
        return buffer.getvalue().rstrip("\n")
    cells = [["" if cell is None else str(cell)[:_WIDTH] for cell in row] for row in answer.rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(answer.columns)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    head = "  ".join(name.ljust(width) for name, width in zip(answer.columns, widths, strict=True)).rstrip()
    more = [f"... more than {len(answer.rows)} rows; raise --limit"] if answer.more else []
    return "\n".join([head, *lines, *more])


def story_answer(story: IncidentStory, *, style: str) -> str:
    """A story as `text` or `json`."""
    return msgspec.json.encode(story).decode() if style == "json" else story_text(story)
