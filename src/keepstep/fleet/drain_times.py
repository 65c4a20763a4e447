"""When a drain began: the accounting says when it took effect, the node says when it was set."""

from __future__ import annotations

import duckdb
import pyarrow as pa

__all__ = ["with_set_times"]

_NOTE = "set earlier than the accounting says; from the node"
_EARLIER = """
    CREATE TEMP TABLE earlier AS
    SELECT told.interval_id, max(seen.start) AS start, arg_max(seen.interval_id, seen.start) AS seen
    FROM rows told JOIN rows seen
      ON told.node = seen.node AND told.reason = seen.reason AND told.interval_id <> seen.interval_id
     AND (told.cluster = seen.cluster OR seen.cluster = '')
    WHERE told.kind = 'drain' AND told.start_note = '' AND seen.start_note LIKE 'set at this time%'
      AND seen.start < told.start AND seen.start > told.start - INTERVAL 30 DAY
      AND NOT EXISTS (FROM rows other WHERE other.node = told.node AND other.start_note = '' AND other.kind = 'drain'
                      AND other.reason = told.reason AND other.start >= seen.start AND other.start < told.start)
    GROUP BY told.interval_id
"""


def with_set_times(intervals: pa.Table) -> pa.Table | None:
    """`intervals` with the begin of drains moved to when they were set; None if nothing changes.

    sacctmgr starts a drain when the node is DRAINED; scontrol says when it was set DRAINING. They are matched by
    node and reason. The interval that only the node told is then the same one and is left out.
    """
    connection = duckdb.connect(":memory:", config={"threads": 2})
    connection.register("rows", intervals)
    connection.execute(_EARLIER)
    if not connection.execute("SELECT count(*) FROM earlier").fetchall()[0][0]:
        return None
    names = ", ".join(
        "coalesce(e.start, r.start) AS start"
        if name == "start"
        else f"CASE WHEN e.start IS NOT NULL THEN '{_NOTE}' ELSE r.start_note END AS start_note"
        if name == "start_note"
        else f'r."{name}"'
        for name in intervals.schema.names
    )
    return (
        connection.sql(
            f"SELECT {names} FROM rows r LEFT JOIN earlier e USING (interval_id) "
            "WHERE r.interval_id NOT IN (SELECT seen FROM earlier) ORDER BY r.interval_id"
        )
        .to_arrow_table()
        .cast(intervals.schema)
    )
