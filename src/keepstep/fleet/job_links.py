"""Which attempt goes on with which: requeues by the scheduler, parts of one heterogeneous job, retries by the user."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa

from keepstep.fleet.taxonomy import Windows

__all__ = ["FAILED_STATES", "link_attempts"]

FAILED_STATES = ("NODE_FAIL", "FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""States in which an attempt did not do what it was to do, and nobody wished it so."""

_RETRIED = (*FAILED_STATES, "TIMEOUT", "PREEMPTED", "DEADLINE")
"""States after which a user submits the same work again."""

_ATTEMPTS = """
    CREATE OR REPLACE TEMP TABLE linked AS
    SELECT attempt_id, cluster, job_id, "user", name, partition, group_key, state,
           array_job, array_task, het_job, het_offset,
           coalesce(submit, start) AS came,
           greatest(coalesce(submit, start), coalesce(eligible, submit, start)) AS ready,
           start, "end", coalesce("end", last_seen) AS until
    FROM attempts
"""
_REQUEUES = """
    CREATE OR REPLACE TEMP TABLE requeues AS
    WITH again AS (
        SELECT cluster, job_id FROM linked GROUP BY cluster, job_id HAVING count(*) > 1
    ), lives AS (
        SELECT attempt_id, came, coalesce(het_offset, 0) AS part,
               lag(attempt_id) OVER life AS before,
               lag(coalesce(until, came)) OVER life AS gone
        FROM linked SEMI JOIN again USING (cluster, job_id)
        WINDOW life AS (PARTITION BY cluster, job_id ORDER BY came, start NULLS LAST, attempt_id)
    )
    SELECT attempt_id, before AS predecessor, 1 AS step FROM lives
    WHERE before IS NOT NULL AND part = 0 AND came <= gone + to_seconds({requeue_s})
"""
_PARTS = """
    CREATE OR REPLACE TEMP TABLE parts AS
    SELECT k.attempt_id, arg_max(l.attempt_id, (l.came, l.attempt_id)) AS predecessor, 0 AS step
    FROM linked k JOIN linked l ON k.cluster = l.cluster AND k.het_job = l.het_job
    WHERE k.het_offset > 0 AND l.het_offset = 0 AND l.came <= k.came + INTERVAL 60 SECOND
    GROUP BY k.attempt_id
"""
_RETRIES = """
    CREATE OR REPLACE TEMP TABLE retries AS
    WITH ended AS (
        SELECT attempt_id, cluster, "user", name, coalesce(array_task, -1) AS task, coalesce(array_job, -1) AS array,
               until
        FROM linked
        WHERE state IN {retried} AND until IS NOT NULL AND "user" <> '' AND name <> ''
          AND coalesce(het_offset, 0) = 0
          AND attempt_id NOT IN (SELECT predecessor FROM requeues)
    ), fresh AS (
        SELECT attempt_id, cluster, "user", name, coalesce(array_task, -1) AS task, coalesce(array_job, -1) AS array,
               ready
        FROM linked SEMI JOIN ended USING (cluster, "user", name)
        WHERE ready IS NOT NULL AND coalesce(het_offset, 0) = 0
          AND attempt_id NOT IN (SELECT attempt_id FROM requeues)
    ), next AS (
        SELECT fresh.attempt_id, ended.attempt_id AS predecessor, ended.until
        FROM ended ASOF JOIN fresh
          ON ended.cluster = fresh.cluster AND ended."user" = fresh."user" AND ended.name = fresh.name
         AND ended.task = fresh.task AND ended.until <= fresh.ready
        WHERE fresh.ready <= ended.until + to_seconds({retry_s})
          AND (ended.array <> fresh.array OR fresh.array = -1) AND ended.attempt_id <> fresh.attempt_id
    )
    SELECT attempt_id, arg_max(predecessor, (until, predecessor)) AS predecessor, 1 AS step
    FROM next GROUP BY attempt_id
"""
_GROUPS = """
    CREATE OR REPLACE TEMP TABLE named AS
    WITH members AS (
        SELECT attempt_id, came, lag(attempt_id) OVER work AS before, lag(until) OVER work AS gone
        FROM linked
        WHERE group_key <> '' AND coalesce(het_offset, 0) = 0 AND array_task IS NULL
          AND attempt_id NOT IN (SELECT attempt_id FROM requeues)
          AND attempt_id NOT IN (SELECT attempt_id FROM retries)
        WINDOW work AS (PARTITION BY cluster, "user", group_key ORDER BY came, attempt_id)
    )
    SELECT attempt_id, before AS predecessor, 1 AS step FROM members
    WHERE before IS NOT NULL AND came >= gone - INTERVAL 60 SECOND
      AND before NOT IN (SELECT predecessor FROM requeues) AND before NOT IN (SELECT predecessor FROM retries)
"""


def link_attempts(connection: duckdb.DuckDBPyConnection, windows: Windows) -> pa.Table:
    """One row an attempt with `run_id` (the first attempt of its run), `life`, `predecessor` and `how`.

    `connection` has the table `attempts`. Requeues are lives of one job id that follow each other within
    `requeue_minutes`; ids that come back years later are other jobs. A retry is the next submission of the same name
    by the same user within `retry_minutes` after an attempt that did not end well; each is followed by at most one.
    A group given by the user in the comment joins what follows each other under it.
    """
    connection.execute(_ATTEMPTS)
    connection.execute(_REQUEUES.format(requeue_s=windows.requeue_minutes * 60))
    connection.execute(_PARTS)
    connection.execute(_RETRIES.format(retried=_RETRIED, retry_s=windows.retry_minutes * 60))
    connection.execute(_GROUPS)
    links = connection.sql(
        """
        SELECT attempt_id, predecessor, step, how FROM (
            SELECT *, 'requeue' AS how FROM requeues UNION ALL SELECT *, 'part' FROM parts
            UNION ALL SELECT *, 'retry' FROM retries UNION ALL SELECT *, 'group' FROM named
        )
        """
    ).to_arrow_table()
    ids = np.sort(np.asarray(connection.sql("SELECT attempt_id FROM linked").to_arrow_table()["attempt_id"]))
    return _runs(ids, links)


def _runs(ids: np.ndarray, links: pa.Table) -> pa.Table:
    """Follows the links to the first attempt of each run, doubling the stride each round."""
    place = np.searchsorted(ids, np.asarray(links["attempt_id"]))
    target = np.searchsorted(ids, np.asarray(links["predecessor"]))
    parent, life = np.arange(len(ids)), np.zeros(len(ids), dtype=np.int32)
    parent[place] = target
    life[place] = np.asarray(links["step"])
    while True:
        further = parent[parent]
        if np.array_equal(further, parent):
            break
        life = life + life[parent]
        parent = further
    predecessor = np.full(len(ids), -1, dtype=np.int64)
    predecessor[place] = ids[target]
    how = np.full(len(ids), "", dtype=object)
    how[place] = np.asarray(links["how"].to_numpy(zero_copy_only=False), dtype=object)
    return pa.table(
        {
            "attempt_id": pa.array(ids),
            "run_id": pa.array(ids[parent]),
            "life": pa.array(life),
            "predecessor": pa.array(predecessor, mask=predecessor < 0),
            "how": pa.array(how, pa.string()),
        }
    )
