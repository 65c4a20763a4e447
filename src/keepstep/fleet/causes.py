"""Why an attempt ended: evidence from its nodes within the attribution window, or what the scheduler says.

A failure belongs to a cause if a check for it fired in [end - 10 min, end + 5 min], edges included, of an attempt
that ended NODE_FAIL or FAILED (Meta, Revisiting Reliability, HPCA 2025). Among several the first cause in the order
of the taxonomy wins, then the earliest; consequences are asked only where there is no first cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import pyarrow as pa

from keepstep.fleet.job_links import FAILED_STATES
from keepstep.fleet.taxonomy import Cause, Taxonomy

__all__ = ["attribute"]

_CRITICAL = 2
_EVIDENCE = """
    CREATE OR REPLACE TEMP TABLE evidence AS
    SELECT r.node, r.cluster, r.time AS moment, c.rank, 'check' AS source, r.result_id AS evidence_id,
           concat_ws(' ', nullif(r."check", ''), nullif(r.device, ''), left(r.message, 120)) AS words
    FROM health_results r JOIN check_causes c
      ON r."check" = c."check" AND r.message = c.message AND coalesce(r.xid, -1) = c.xid
    WHERE (r.status = {critical} OR r.xid IS NOT NULL) AND r.time IS NOT NULL
    UNION ALL
    SELECT i.node, i.cluster, i.start, c.rank, 'interval', i.interval_id, concat_ws(' ', i.kind, left(i.reason, 120))
    FROM node_intervals i JOIN interval_causes c
      ON i.reason = c.reason AND i.class = c.class AND i.description = c.description
    WHERE i.node <> '' AND i.start IS NOT NULL AND i.kind <> 'reserved'
    UNION ALL
    SELECT n.node, n.cluster, n.onset, c.rank, 'incident', n.incident_id, concat_ws(' ', n.kind, n.op)
    FROM incidents n JOIN incident_causes c ON n.kind = c.kind AND n.layer = c.layer
    WHERE n.node <> '' AND n.onset IS NOT NULL
"""
_MATCH = """
    CREATE OR REPLACE TEMP TABLE matched AS
    WITH ends AS (
        SELECT f.attempt_id, f.cluster, f."end" AS gone, n.node,
               epoch_us(f."end") // {bucket_us} AS bucket
        FROM failures f JOIN attempt_nodes n USING (attempt_id)
        WHERE f."end" IS NOT NULL AND f.ended_as IN ('NODE_FAIL', 'FAILED')
    ), near AS (
        SELECT evidence.*, epoch_us(moment) // {bucket_us} + shift AS bucket
        FROM evidence, (VALUES (-1), (0), (1)) AS shifts(shift)
    )
    SELECT attempt_id, arg_min(struct_pack(rank := near.rank, source := near.source, evidence_id := near.evidence_id,
                                           words := near.words, moment := near.moment, node := near.node),
                               (near.rank, near.moment, near.evidence_id)) AS best
    FROM ends JOIN near ON ends.node = near.node AND ends.bucket = near.bucket
    WHERE (near.cluster = ends.cluster OR near.cluster = '' OR ends.cluster = '')
      AND near.moment >= ends.gone - to_seconds({before_s}) AND near.moment <= ends.gone + to_seconds({after_s})
    GROUP BY attempt_id
"""
_CAUSES = """
    CREATE OR REPLACE TEMP TABLE caused AS
    SELECT f.attempt_id, f.cluster, f."end", f.state,
           coalesce(m.best.rank, e.rank, -1) AS rank,
           coalesce(m.best.source, CASE WHEN e.rank IS NULL THEN '' ELSE 'scheduler' END) AS source,
           m.best.evidence_id AS evidence_id, m.best.node AS evidence_node,
           CASE WHEN m.best IS NOT NULL
                THEN concat(m.best.source, ' on ', m.best.node, ' at ', strftime(m.best.moment, '%Y-%m-%dT%H:%M:%S'),
                            'Z: ', m.best.words)
                ELSE concat_ws(' ', f.state, f.said) END AS evidence
    FROM failures f LEFT JOIN matched m USING (attempt_id)
    LEFT JOIN ending_causes e ON f.state = e.state AND f.code = e.code AND f.signal = e.signal
"""
_FAILURES = """
    CREATE OR REPLACE TEMP TABLE failures AS
    WITH worst AS (
        SELECT s.cluster, s.job_id, s.start, s.exit_code, s.exit_signal, s.state,
               CASE WHEN s.exit_signal = 125 OR s.state = 'OUT_OF_MEMORY' THEN 2
                    WHEN s.exit_signal > 0 AND s.exit_signal <> 15 THEN 1 ELSE 0 END AS weight
        FROM steps s WHERE s.exit_signal > 0 OR s.exit_code > 0 OR s.state = 'OUT_OF_MEMORY'
    ), told AS (
        SELECT a.attempt_id, arg_max(struct_pack(w.exit_code, w.exit_signal, w.state), (w.weight, w.start)) AS step
        FROM attempts a JOIN worst w ON a.job_id = w.job_id AND a.cluster = w.cluster
         AND w.start >= a.start - INTERVAL 1 SECOND AND w.start <= coalesce(a."end", a.last_seen)
        WHERE a.state IN {failed} GROUP BY a.attempt_id
    )
    SELECT a.attempt_id, a.cluster, a."end", a.nodes, a.state AS ended_as,
           CASE WHEN told.step.state = 'OUT_OF_MEMORY' OR told.step.exit_signal = 125 OR a.exit_signal = 125
                       OR a.derived_signal = 125
                THEN 'OUT_OF_MEMORY' ELSE a.state END AS state,
           coalesce(nullif(a.exit_code, 0), nullif(a.derived_code, 0), told.step.exit_code, 0) AS code,
           coalesce(nullif(a.exit_signal, 0), nullif(a.derived_signal, 0), told.step.exit_signal, 0) AS signal,
           concat('exit ', coalesce(nullif(a.exit_code, 0), nullif(a.derived_code, 0), told.step.exit_code, 0), ':',
                  coalesce(nullif(a.exit_signal, 0), nullif(a.derived_signal, 0), told.step.exit_signal, 0)) AS said
    FROM attempts a LEFT JOIN told USING (attempt_id) WHERE a.state IN {failed}
"""


def attribute(connection: duckdb.DuckDBPyConnection, taxonomy: Taxonomy) -> None:
    """Makes the table `caused`: for each failed attempt the rank of its cause (-1: none), source and evidence.

    `connection` has the tables attempts, attempt_nodes, steps, health_results, node_intervals and incidents. Ranks
    are those of `taxonomy.causes`.
    """
    connection.execute(_FAILURES.format(failed=FAILED_STATES))
    _register(
        connection,
        "check_causes",
        query=_CHECKS,
        cause=lambda row: taxonomy.of_check(row[0], row[1], xid=_known(row[2])),
    )
    _register(connection, "interval_causes", query=_INTERVALS, cause=lambda row: taxonomy.of_interval(*row))
    _register(connection, "incident_causes", query=_INCIDENTS, cause=lambda row: taxonomy.of_incident(*row))
    _register(
        connection,
        "ending_causes",
        query=_ENDINGS,
        cause=lambda row: taxonomy.of_ending(row[0], row[1], signal=row[2]),
    )
    windows = taxonomy.windows
    bucket_us = int(max(windows.before_minutes, windows.after_minutes, 1) * 60_000_000)
    connection.execute(_EVIDENCE.format(critical=_CRITICAL))
    connection.execute(
        _MATCH.format(bucket_us=bucket_us, before_s=windows.before_minutes * 60, after_s=windows.after_minutes * 60)
    )
    connection.execute(_CAUSES)


_CHECKS = f"""
    SELECT DISTINCT "check", message, coalesce(xid, -1) AS xid FROM health_results
    WHERE status = {_CRITICAL} OR xid IS NOT NULL
"""
_INTERVALS = "SELECT DISTINCT reason, class, description FROM node_intervals WHERE node <> ''"
_INCIDENTS = "SELECT DISTINCT kind, layer FROM incidents"
_ENDINGS = "SELECT DISTINCT state, code, signal FROM failures"


def _known(xid: int) -> int | None:
    return None if xid < 0 else xid


def _register(
    connection: duckdb.DuckDBPyConnection, name: str, *, query: str, cause: Callable[[tuple[Any, ...]], Cause | None]
) -> None:
    """The table `name`: each different row of `query` with the rank of its cause; rows without a cause are left out."""
    found = connection.sql(query).to_arrow_table()
    columns = [column.to_pylist() for column in found.columns]
    rows = list(zip(*columns, strict=True))
    causes = [cause(row) for row in rows]
    ranks = pa.array([None if one is None else one.rank for one in causes], pa.int32())
    table = found.append_column("rank", ranks)
    connection.register(f"{name}_rows", table.filter(ranks.is_valid()))
    connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM {name}_rows")
    connection.unregister(f"{name}_rows")
