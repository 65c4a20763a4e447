"""Who took the place of a preempted attempt, and whether that was because another attempt had failed."""

from __future__ import annotations

import duckdb

from keepstep.fleet.job_links import FAILED_STATES

__all__ = ["link_preemptions"]

_TAKEN = """
    CREATE OR REPLACE TEMP TABLE preempted AS
    WITH victims AS (
        SELECT a.attempt_id, a."end" - INTERVAL 2 SECOND AS gone, n.node
        FROM attempts a JOIN attempt_nodes n USING (attempt_id)
        WHERE a.state = 'PREEMPTED' AND a."end" IS NOT NULL
    ), places AS (
        SELECT DISTINCT node FROM victims
    ), starts AS (
        SELECT n.node, a.start, a.attempt_id AS taker
        FROM attempts a JOIN attempt_nodes n USING (attempt_id) SEMI JOIN places USING (node)
        WHERE a.start IS NOT NULL AND a.state <> 'PREEMPTED'
           OR a.start IS NOT NULL AND a."end" > a.start + INTERVAL 1 SECOND
    ), next AS (
        SELECT victims.attempt_id, starts.taker, starts.start, victims.gone
        FROM victims ASOF JOIN starts ON victims.node = starts.node AND victims.gone <= starts.start
    ), shared AS (
        SELECT attempt_id, taker, count(*) AS nodes, min(start) AS start FROM next
        WHERE start <= gone + to_seconds({window_s} + 2) AND taker <> attempt_id
        GROUP BY attempt_id, taker
    )
    SELECT attempt_id, arg_max(taker, (nodes, -epoch_us(start), taker)) AS preempted_by
    FROM shared GROUP BY attempt_id
"""
_VICTIMS = """
    CREATE OR REPLACE TEMP TABLE victims AS
    SELECT p.attempt_id, p.preempted_by,
           CASE WHEN f.attempt_id IS NOT NULL THEN l.predecessor END AS victim_of
    FROM preempted p
    LEFT JOIN links l ON p.preempted_by = l.attempt_id
    LEFT JOIN (SELECT attempt_id FROM attempts WHERE state IN {failed}) f ON l.predecessor = f.attempt_id
"""


def link_preemptions(connection: duckdb.DuckDBPyConnection, minutes: float) -> None:
    """Makes the table `victims`: for each preempted attempt who took its nodes, and the failed attempt behind it.

    `connection` has attempts, attempt_nodes and `links` (attempt_id, predecessor). The taker is the attempt that
    started within `minutes` on most of the nodes; if it is the next life, or the retry, of an attempt that failed,
    the preemption is that failure's second-order loss (Meta, Revisiting Reliability, HPCA 2025).
    """
    connection.execute(_TAKEN.format(window_s=minutes * 60))
    connection.execute(_VICTIMS.format(failed=FAILED_STATES))
