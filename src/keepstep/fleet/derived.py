"""From attempts and evidence to facts, job runs and physical events. Everything is made again from the whole."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa

from keepstep.fleet.causes import attribute
from keepstep.fleet.job_links import FAILED_STATES, link_attempts
from keepstep.fleet.preemptions import link_preemptions
from keepstep.fleet.run_rows import OF_FIRST, run_rows
from keepstep.fleet.taxonomy import Taxonomy
from keepstep.records.fleet_schema import arrow_schema

__all__ = ["derive"]

_EVENTS = """
    CREATE OR REPLACE TEMP TABLE happened AS
    WITH placed AS (
        SELECT c.attempt_id, c.cluster, c."end" AS moment, c.rank, c.source, c.evidence_id, k.event_s,
               coalesce(CASE WHEN k.wide THEN '' END, c.evidence_node, n.node, c.attempt_id::VARCHAR) AS place
        FROM caused c JOIN cause_kinds k USING (rank)
        LEFT JOIN (SELECT attempt_id, min(node) AS node FROM attempt_nodes GROUP BY attempt_id) n USING (attempt_id)
        WHERE k.counts AND c."end" IS NOT NULL
    ), gaps AS (
        SELECT *, moment - lag(moment) OVER spot > to_seconds(event_s) AS apart FROM placed
        WINDOW spot AS (PARTITION BY cluster, rank, place ORDER BY moment, attempt_id)
    ), numbered AS (
        SELECT *, sum(CASE WHEN apart IS NULL OR apart THEN 1 ELSE 0 END)
                  OVER (PARTITION BY cluster, rank, place ORDER BY moment, attempt_id) AS number
        FROM gaps
    )
    SELECT attempt_id, cluster, rank, moment, place, source, evidence_id,
           first_value(attempt_id) OVER (PARTITION BY cluster, rank, place, number ORDER BY moment, attempt_id) AS first
    FROM numbered
"""
_REPEATS = """
    CREATE OR REPLACE TEMP TABLE repeated AS
    WITH own AS (
        SELECT l.run_id, l.life, c.attempt_id, c.rank, f.code, f.signal, k.counts
        FROM caused c JOIN links l USING (attempt_id) JOIN failures f USING (attempt_id)
        LEFT JOIN cause_kinds k USING (rank)
    ), pairs AS (
        SELECT later.run_id, later.life, later.attempt_id, earlier.attempt_id AS repeat_of
        FROM own later JOIN own earlier ON later.run_id = earlier.run_id AND earlier.life = later.life - 1
        WHERE later.rank = earlier.rank AND later.code = earlier.code AND later.signal = earlier.signal
          AND NOT coalesce(later.counts, false)
    )
    SELECT attempt_id, run_id, life, max(repeat_of) AS repeat_of FROM pairs GROUP BY ALL
"""
_LOOPS = """
    CREATE OR REPLACE TEMP TABLE loops AS
    WITH marked AS (SELECT DISTINCT run_id, life FROM repeated),
    islands AS (
        SELECT run_id, life - row_number() OVER (PARTITION BY run_id ORDER BY life) AS island FROM marked
    )
    SELECT DISTINCT run_id FROM islands GROUP BY run_id, island HAVING count(*) + 1 >= {loop}
"""
_FACTS = """
    SELECT l.attempt_id, l.run_id, l.life::INTEGER AS life,
           CASE a.state WHEN 'COMPLETED' THEN 'completed' WHEN 'CANCELLED' THEN 'cancelled'
                WHEN 'TIMEOUT' THEN 'timeout' WHEN 'DEADLINE' THEN 'timeout' WHEN 'PREEMPTED' THEN 'preempted'
                WHEN 'REQUEUED' THEN 'requeued' WHEN 'REQUEUE_HOLD' THEN 'requeued' WHEN 'RESIZING' THEN 'resized'
                WHEN 'PENDING' THEN 'pending'
                ELSE CASE WHEN a.state IN {failed} THEN 'failed'
                          WHEN a.state IN ('RUNNING', 'SUSPENDED', 'COMPLETING', 'CONFIGURING', 'STAGE_OUT', 'STOPPED',
                                           'SIGNALING') THEN 'running'
                          ELSE 'unknown' END END AS ending,
           coalesce(k.name, CASE a.state WHEN 'PREEMPTED' THEN 'preempted' WHEN 'TIMEOUT' THEN 'time_limit'
                WHEN 'CANCELLED' THEN 'cancelled'
                ELSE CASE WHEN c.rank IS NULL THEN '' ELSE 'unknown' END END) AS cause,
           coalesce(k.owner, CASE a.state WHEN 'PREEMPTED' THEN 'scheduler' WHEN 'TIMEOUT' THEN 'user_program'
                WHEN 'CANCELLED' THEN CASE WHEN a.cancelled_by IN ('', a."user") THEN 'user_program'
                                           ELSE 'operator' END
                ELSE CASE WHEN c.rank IS NULL THEN '' ELSE 'unknown' END END) AS owner,
           c.attempt_id IS NOT NULL AS failed,
           coalesce(k.counts, false) AS infrastructure,
           c.attempt_id IS NOT NULL AND coalesce(h.first = l.attempt_id, true) AND r.repeat_of IS NULL AS independent,
           r.repeat_of, h.first AS event_id, coalesce(h.first = l.attempt_id, false) AS first_cause,
           v.victim_of, v.preempted_by, coalesce(c.evidence, '') AS evidence,
           l.how, a.state, a.gpus, a.node_count, coalesce(a.submit, a.start) AS came, a.start, a."end",
           coalesce(a."end", a.last_seen) AS until
    FROM links l JOIN attempts a USING (attempt_id)
    LEFT JOIN caused c USING (attempt_id) LEFT JOIN cause_kinds k USING (rank)
    LEFT JOIN happened h ON h.attempt_id = l.attempt_id
    LEFT JOIN repeated r ON r.attempt_id = l.attempt_id
    LEFT JOIN victims v ON v.attempt_id = l.attempt_id
"""
_EVENT_ROWS = """
    SELECT h.first AS event_id, any_value(h.cluster) AS cluster, min(h.moment) AS "time", any_value(k.name) AS cause,
           any_value(k.owner) AS owner,
           coalesce(string_agg(DISTINCT coalesce(c.evidence_node, nullif(a.failed_node, '')), ','
                    ORDER BY coalesce(c.evidence_node, nullif(a.failed_node, ''))), '') AS nodes,
           count(DISTINCT h.attempt_id)::INTEGER AS attempts, h.first AS "first", sum(a.gpus)::BIGINT AS gpus,
           min(h.evidence_id) FILTER (h.source = 'interval') AS interval_id,
           min(h.evidence_id) FILTER (h.source = 'check') AS result_id
    FROM happened h JOIN cause_kinds k USING (rank) JOIN attempts a USING (attempt_id) JOIN caused c USING (attempt_id)
    GROUP BY h.first ORDER BY h.first
"""


def derive(connection: duckdb.DuckDBPyConnection, taxonomy: Taxonomy) -> dict[str, pa.Table]:
    """The tables attempt_facts, job_runs and failure_events.

    `connection` has the base tables and `attempt_nodes`. The result depends on nothing but these and `taxonomy`.
    """
    links = link_attempts(connection, taxonomy.windows)
    connection.register("link_rows", links)
    connection.execute("CREATE OR REPLACE TEMP TABLE links AS SELECT * FROM link_rows")
    connection.unregister("link_rows")
    attribute(connection, taxonomy)
    connection.register("kind_rows", _kinds(taxonomy))
    connection.execute("CREATE OR REPLACE TEMP TABLE cause_kinds AS SELECT * FROM kind_rows")
    connection.unregister("kind_rows")
    connection.execute(_EVENTS)
    connection.execute(_REPEATS)
    connection.execute(_LOOPS.format(loop=int(taxonomy.windows.crash_loop)))
    link_preemptions(connection, taxonomy.windows.preempt_minutes)
    lives = _ordered(connection, _FACTS.format(failed=FAILED_STATES))
    said = ", ".join(f'"{name}"' for name in OF_FIRST)
    names = connection.sql(f"SELECT attempt_id, {said} FROM attempts").to_arrow_table()
    loops = connection.sql("SELECT run_id FROM loops").to_arrow_table()["run_id"].to_numpy()
    return {
        "attempt_facts": lives.select(arrow_schema("attempt_facts").names),
        "job_runs": run_rows(lives, names, loops=loops),
        "failure_events": connection.sql(_EVENT_ROWS).to_arrow_table(),
    }


def _ordered(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """The rows of `query` by attempt_id; sorting the ids alone is faster than sorting the rows."""
    rows = connection.sql(query).to_arrow_table()
    return rows.take(pa.array(np.argsort(rows["attempt_id"].to_numpy())))


def _kinds(taxonomy: Taxonomy) -> pa.Table:
    """The causes as a table: rank, name, owner, whether they count, their scope and how close events are."""
    causes = taxonomy.causes
    return pa.table(
        {
            "rank": pa.array([cause.rank for cause in causes], pa.int32()),
            "name": pa.array([cause.name for cause in causes], pa.string()),
            "owner": pa.array([cause.owner for cause in causes], pa.string()),
            "counts": pa.array(np.array([cause.counts for cause in causes], dtype=bool)),
            "wide": pa.array(np.array([cause.scope == "cluster" for cause in causes], dtype=bool)),
            "event_s": pa.array([cause.event_seconds for cause in causes], pa.int64()),
        }
    )
