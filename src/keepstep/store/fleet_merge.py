"""One row for each thing: versions of a row from several imports become one."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa

from keepstep.records.fleet_schema import TABLES, arrow_schema

__all__ = ["merged"]


def merged(table: str, rows: pa.Table) -> pa.Table:
    """`rows` (older first) with each id once, or each row once where the table has no id; ordered by id.

    Of several versions the one that has ended wins, then the last; its open fields are filled from the others. A
    waiting version of an attempt is left out where the same submission has a version that started.
    """
    first = TABLES[table].columns[0]
    if first.kind != "id" or first.name == "source_id" or table == "attempt_nodes":
        return _distinct(table, rows)
    ids = np.sort(np.asarray(rows[first.name]))
    if (ids[1:] == ids[:-1]).any():
        rows = _chosen(table, rows)
    if table == "attempts":
        rows = _without_waiting(rows)
    return rows.sort_by(first.name) if table != "attempts" else rows


def _distinct(table: str, rows: pa.Table) -> pa.Table:
    """Rows that differ in more than their source."""
    connection = duckdb.connect(":memory:", config={"threads": 2})
    connection.register("rows", rows)
    names = arrow_schema(table).names
    same = [name for name in names if name != "source_id" or table == "kept_aside"]
    columns = ", ".join(f'"{name}"' if name in same else f'max("{name}") AS "{name}"' for name in names)
    keys = ", ".join(f'"{name}"' for name in same)
    return connection.sql(f"SELECT {columns} FROM rows GROUP BY {keys} ORDER BY {keys}").to_arrow_table()


def _chosen(table: str, rows: pa.Table) -> pa.Table:
    """Rows with ids that occur several times become one each; the others are passed through."""
    connection = duckdb.connect(":memory:", config={"threads": 2})
    connection.register("rows", rows)
    key = TABLES[table].columns[0].name
    numbered = rows.append_column("_order", pa.array(range(rows.num_rows), pa.int64()))
    connection.register("numbered", numbered)
    ended = "end" in rows.schema.names
    order = '("end" IS NOT NULL) DESC, _order DESC' if ended else "_order DESC"
    kinds = {column.name: column.kind for column in TABLES[table].columns}
    columns = ", ".join(
        f'first("{name}" ORDER BY {order}) FILTER ("{name}" IS NOT NULL'
        + (f" AND \"{name}\" <> ''" if kinds[name] == "text" else "")
        + f') AS "{name}"'
        for name in rows.schema.names
        if name != key
    )
    connection.execute(f"CREATE TEMP TABLE twice AS SELECT {key} FROM rows GROUP BY ALL HAVING count(*) > 1")
    many = connection.sql(
        f"SELECT {key}, {columns} FROM numbered SEMI JOIN twice USING ({key}) GROUP BY {key}"
    ).to_arrow_table()
    once = connection.sql(f"SELECT rows.* FROM rows ANTI JOIN twice USING ({key})").to_arrow_table()
    filled = [
        pa.compute.fill_null(many[field.name], "") if pa.types.is_string(field.type) else many[field.name]
        for field in rows.schema
    ]
    return pa.concat_tables(
        [once.cast(rows.schema), pa.Table.from_arrays(filled, names=rows.schema.names).cast(rows.schema)]
    )


def _without_waiting(rows: pa.Table) -> pa.Table:
    """Attempts without those that wait where the same submission has started since."""
    if not rows["start"].null_count:
        return rows
    connection = duckdb.connect(":memory:", config={"threads": 2})
    connection.register("rows", rows)
    query = """
        SELECT rows.* FROM rows ANTI JOIN (
            SELECT w.attempt_id FROM rows w JOIN rows s
            ON w.job_id = s.job_id AND w.submit = s.submit AND w.cluster IN (s.cluster, '')
            WHERE w.start IS NULL AND s.start IS NOT NULL
        ) gone USING (attempt_id)
    """
    return connection.sql(query).to_arrow_table().cast(rows.schema)
