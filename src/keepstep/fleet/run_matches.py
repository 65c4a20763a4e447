"""Which job of the scheduler a keepstep run was: the one that held its nodes all the time."""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["match_runs", "named_jobs", "without_matched"]

_PAIRS = """
    SELECT r.job_id AS job, s.job_id AS scheduler_job, r.nodes AS run_nodes, s.nodes AS job_nodes
    FROM attempts r JOIN attempts s
      ON s.start <= r.start + INTERVAL 60 SECOND
     AND coalesce(s."end", s.last_seen) >= r.last_seen - INTERVAL 60 SECOND
    WHERE r.partition = '{mark}' AND s.partition <> '{mark}' AND r.nodes <> ''
"""


def match_runs(
    connection: duckdb.DuckDBPyConnection, mark: str, *, expand: Callable[[str], tuple[str, ...]]
) -> dict[str, str]:
    """The scheduler's job of each run; runs for which there is none, or more than one, are left out.

    `mark` is the partition of attempts that only a journal tells of; `expand` gives the names of a list of nodes.
    """
    if not connection.execute(f"SELECT count(*) FROM attempts WHERE partition = '{mark}'").fetchall()[0][0]:
        return {}
    found: dict[str, set[str]] = {}
    for job, scheduler, run_nodes, job_nodes in connection.execute(_PAIRS.format(mark=mark)).fetchall():
        if set(expand(run_nodes)) <= set(expand(job_nodes)):
            found.setdefault(job, set()).add(scheduler)
    return {job: next(iter(jobs)) for job, jobs in found.items() if len(jobs) == 1}


def without_matched(attempts: pa.Table, mark: str, *, matched: dict[str, str]) -> pa.Table | None:
    """`attempts` without runs that the scheduler's own rows tell of; None if there is none."""
    jobs = pa.array(sorted(matched), pa.string())
    twice = pc.and_(pc.equal(attempts["partition"], mark), pc.is_in(attempts["job_id"], value_set=jobs))
    return attempts.filter(pc.invert(twice)) if pc.any(twice).as_py() else None


def named_jobs(rows: pa.Table, matched: dict[str, str]) -> pa.Table | None:
    """Incidents or progress with the scheduler's job filled in where it is known now; None if nothing changes."""
    place = rows.schema.get_field_index("scheduler_job")
    told = rows["scheduler_job"].to_pylist()
    names = [was or matched.get(job, "") for was, job in zip(told, rows["job"].to_pylist(), strict=True)]
    return rows.set_column(place, rows.schema.field(place), pa.array(names, pa.string())) if names != told else None
