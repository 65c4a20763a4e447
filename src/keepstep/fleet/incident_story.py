"""The story of one incident: what waited, who had finished, which path, what was excluded, what came next."""

from __future__ import annotations

import datetime
from typing import Any

import duckdb
import msgspec

from keepstep.errors import UsageError

__all__ = ["IncidentStory", "story_of", "story_text"]

_UNKNOWN = "not recorded"
_PHASES = (
    "detected",
    "decided",
    "fenced",
    "standby_chosen",
    "warmed",
    "connected",
    "copied",
    "joined",
    "first_valid",
)


class IncidentStory(msgspec.Struct, frozen=True, kw_only=True):
    """One incident or failed attempt. Answers that nothing recorded are None; `path` is a link or nodes.

    Phases are in microseconds from the onset. `neighbours` are other attempts that the same event ended, `checks` and
    `intervals` what the nodes said around the time.
    """

    which: str
    job: str
    scheduler_job: str = ""
    attempt: int | None = None
    kind: str = ""
    cause: str = ""
    owner: str = ""
    onset: str | None = None
    operation: str | None = None
    group: str | None = None
    sequence: int | None = None
    step: int | None = None
    generation: int | None = None
    rank: int | None = None
    node: str | None = None
    device: str | None = None
    waiting: str | None = None
    finished: str | None = None
    path: str | None = None
    excluded: str | None = None
    remedy: str | None = None
    next_step: int | None = None
    next_attempt: str | None = None
    evidence: tuple[str, ...] = ()
    phases_us: dict[str, int] = {}
    neighbours: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    intervals: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


def story_of(connection: duckdb.DuckDBPyConnection, which: str) -> IncidentStory:
    """The story of `which`: an incident_id, JOB:NUMBER, or the id of a job that failed (its last failure).

    `connection` has the tables of a fleet. Raises UsageError if nothing of that name is there.
    """
    job, _, number = which.rpartition(":")
    rows = _rows(
        connection,
        "SELECT * FROM incidents WHERE (job = ? AND CAST(number AS VARCHAR) = ?) OR CAST(incident_id AS VARCHAR) = ? "
        "OR (job = ? AND ? <> '') ORDER BY onset, number LIMIT 1",
        job,
        number,
        which,
        which,
        which,
    )
    if rows:
        return _of_incident(connection, which, row=rows[0])
    failed = _rows(
        connection,
        "SELECT a.*, f.* EXCLUDE (attempt_id), e.nodes AS event_nodes FROM attempts a JOIN attempt_facts f "
        "USING (attempt_id) LEFT JOIN failure_events e ON e.event_id = f.event_id "
        "WHERE (a.job_id = ? OR CAST(a.attempt_id AS VARCHAR) = ? OR CAST(f.event_id AS VARCHAR) = ?) "
        'AND f.failed ORDER BY a."end" DESC NULLS LAST LIMIT 1',
        which,
        which,
        which,
    )
    if not failed:
        raise UsageError(f"no incident and no failed job {which!r}", remedy="keepstep fleet query DIR --incidents")
    return _of_attempt(connection, which, row=failed[0])


def _rows(connection: duckdb.DuckDBPyConnection, query: str, *values: Any) -> list[dict[str, Any]]:
    result = connection.execute(query, list(values))
    names = [str(column[0]) for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _of_incident(connection: duckdb.DuckDBPyConnection, which: str, *, row: dict[str, Any]) -> IncidentStory:
    attempt = _rows(
        connection,
        "SELECT a.job_id, f.* FROM attempts a JOIN attempt_facts f USING (attempt_id) WHERE a.job_id = ? AND ? <> '' "
        "AND a.start <= ? ORDER BY a.start DESC LIMIT 1",
        row["scheduler_job"],
        row["scheduler_job"],
        row["onset"],
    )
    facts = attempt[0] if attempt else {}
    nodes = [row["node"]] if row["node"] else []
    return IncidentStory(
        which=which,
        job=row["job"],
        scheduler_job=row["scheduler_job"],
        attempt=row["attempt"],
        kind=row["kind"],
        cause=facts.get("cause") or row["layer"],
        owner=facts.get("owner") or "",
        onset=_when(row["onset"]),
        operation=row["op"] or None,
        group=row["group"] or None,
        sequence=row["sequence"],
        step=row["step"],
        generation=row["generation"],
        rank=row["rank"],
        node=row["node"] or None,
        device=row["device"] or None,
        waiting=row["waiting"] or None,
        finished=row["finished"] or None,
        path=row["link"] or None,
        excluded=row["excluded"] or None,
        remedy=row["remedy"] or None,
        next_step=row["next_step"],
        evidence=tuple(line for line in row["evidence"].split("\n") if line),
        phases_us={phase: row[f"{phase}_us"] for phase in _PHASES if row[f"{phase}_us"] is not None},
        checks=_checks(connection, nodes, when=row["onset"]),
        intervals=_intervals(connection, nodes, when=row["onset"]),
        **_event(connection, facts),
    )


def _of_attempt(connection: duckdb.DuckDBPyConnection, which: str, *, row: dict[str, Any]) -> IncidentStory:
    after = _rows(
        connection,
        "SELECT a.job_id, a.state, a.start, a.nodes FROM attempt_facts f JOIN attempts a USING (attempt_id) "
        "WHERE f.run_id = ? AND f.life > ? ORDER BY f.life LIMIT 1",
        row["run_id"],
        row["life"],
    )
    nodes = [name for name in (row["event_nodes"] or row["failed_node"] or "").split(",") if name]
    went = f"{after[0]['job_id']} ({after[0]['state']}) on {after[0]['nodes']}" if after else None
    mine = {part[0] for part in connection.execute(_NODES, [row["attempt_id"]]).fetchall()}
    theirs = {part[0] for part in connection.execute(_NEXT_NODES, [row["run_id"], row["life"]]).fetchall()}
    left_out = sorted(mine - theirs) if after and theirs else []
    return IncidentStory(
        which=which,
        job=row["name"] or row["job_id"],
        scheduler_job=row["job_id"],
        attempt=row["life"],
        kind=row["state"],
        cause=row["cause"],
        owner=row["owner"],
        onset=_when(row["end"]),
        node=",".join(nodes) or None,
        path=",".join(nodes) or None,
        excluded=", ".join(f"{name} (not in the next life)" for name in left_out) or None,
        next_attempt=went,
        evidence=tuple(part for part in (row["evidence"],) if part),
        checks=_checks(connection, nodes, when=row["end"]),
        intervals=_intervals(connection, nodes, when=row["end"]),
        **_event(connection, row),
    )


_NODES = "SELECT node FROM attempt_nodes WHERE attempt_id = ?"
_NEXT_NODES = """
    SELECT node FROM attempt_nodes WHERE attempt_id IN (
        SELECT attempt_id FROM attempt_facts WHERE run_id = ? AND life = ? + 1)
"""
_AROUND = "BETWEEN ? - INTERVAL 10 MINUTE AND ? + INTERVAL 5 MINUTE"


def _event(connection: duckdb.DuckDBPyConnection, facts: dict[str, Any]) -> dict[str, Any]:
    """What else the event ended, and whom the restart preempted."""
    if not facts:
        return {}
    others = connection.execute(
        "SELECT a.job_id FROM attempt_facts f JOIN attempts a USING (attempt_id) "
        'WHERE f.event_id = ? AND f.attempt_id <> ? ORDER BY a."end", a.job_id LIMIT 50',
        [facts["event_id"], facts["attempt_id"]],
    ).fetchall()
    victims = connection.execute(
        "SELECT a.job_id FROM attempt_facts f JOIN attempts a USING (attempt_id) WHERE f.victim_of = ? LIMIT 50",
        [facts["attempt_id"]],
    ).fetchall()
    return {"neighbours": tuple(row[0] for row in others), "preempted": tuple(row[0] for row in victims)}


def _checks(connection: duckdb.DuckDBPyConnection, nodes: list[str], *, when: Any) -> tuple[str, ...]:
    rows = _rows(
        connection,
        f'SELECT node, "check", "time", status, message FROM health_results WHERE node IN (SELECT unnest(?)) '
        f'AND status > 0 AND "time" {_AROUND} ORDER BY "time" LIMIT 20',
        nodes,
        when,
        when,
    )
    words = ("OK", "WARN", "CRITICAL", "UNKNOWN")
    return tuple(
        f"{row['node']} {row['check']} {words[min(row['status'], 3)]} at {_when(row['time'])}: {row['message'][:120]}"
        for row in rows
    )


def _intervals(connection: duckdb.DuckDBPyConnection, nodes: list[str], *, when: Any) -> tuple[str, ...]:
    rows = _rows(
        connection,
        f'SELECT node, kind, start, "end", reason FROM node_intervals WHERE node IN (SELECT unnest(?)) '
        f'AND (start {_AROUND} OR (start <= ? AND coalesce("end", ?) >= ?)) ORDER BY start LIMIT 20',
        nodes,
        when,
        when,
        when,
        when,
        when,
    )
    return tuple(
        f"{row['node']} {row['kind']} from {_when(row['start'])} to {_when(row['end']) or 'now'}: {row['reason'][:120]}"
        for row in rows
    )


def _when(value: datetime.datetime | None) -> str | None:
    return None if value is None else f"{value.isoformat()}Z"


def story_text(story: IncidentStory) -> str:
    """The story for people: the five questions first, then the evidence."""
    place = ", ".join(
        f"{name} {value}"
        for name, value in (("rank", story.rank), ("node", story.node), ("device", story.device))
        if value is not None
    )
    named = "" if story.operation is None else f"{story.operation}"
    detail = [
        f"{name} {value}"
        for name, value in (
            ("group", story.group),
            ("sequence", story.sequence),
            ("step", story.step),
            ("generation", story.generation),
        )
        if value is not None
    ]
    waited = ", ".join(part for part in (named, *detail) if part)
    after = f"step {story.next_step}" if story.next_step is not None else story.next_attempt
    lines = [
        f"{story.which}: {story.kind} in {story.job}" + (f", {story.onset}" if story.onset else ""),
        f"  which operation waited  {waited or _UNKNOWN}" + (f"; waiting: {story.waiting}" if story.waiting else ""),
        f"  who had finished        {story.finished or _UNKNOWN}",
        f"  which path              {story.path or _UNKNOWN}" + (f" ({place})" if place else ""),
        f"  what was excluded       {story.excluded or _UNKNOWN}",
        f"  the next step           {after or _UNKNOWN}" + (f"; {story.remedy}" if story.remedy else ""),
        f"  cause                   {story.cause or 'unknown'}" + (f", owner {story.owner}" if story.owner else ""),
    ]
    lines += [f"  evidence                {line}" for line in story.evidence]
    lines += [f"  check                   {line}" for line in story.checks]
    lines += [f"  node                    {line}" for line in story.intervals]
    if story.phases_us:
        reached = ", ".join(f"{name} {value / 1e3:.1f}" for name, value in story.phases_us.items())
        lines.append(f"  ms from onset           {reached}")
    if story.neighbours:
        lines.append(f"  same event              {', '.join(story.neighbours)}")
    if story.preempted:
        lines.append(f"  preempted for it        {', '.join(story.preempted)}")
    return "\n".join(lines)
