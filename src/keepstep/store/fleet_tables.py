"""Reading the tables of a fleet directory: as Arrow tables, or as views of a DuckDB connection that sees only them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from keepstep.errors import StoreError, UsageError
from keepstep.records.fleet_schema import TABLES, arrow_schema, empty
from keepstep.store.fleet_manifest import MANIFEST, Part, read_manifest

__all__ = ["FleetStore", "quoted"]

_THREADS = 2
_MEMORY = "2GB"


def quoted(text: str) -> str:
    """`text` as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


class FleetStore:
    """The tables in `directory`. Raises UsageError if it is no fleet directory, StoreError if a file is damaged."""

    def __init__(self, directory: Path) -> None:
        if not (directory / MANIFEST).is_file():
            raise UsageError(
                "not a fleet directory", where=str(directory), remedy="keepstep fleet import SOURCE... --into DIR"
            )
        self.directory = directory.resolve()
        self.manifest = read_manifest(directory)

    def parts(self, table: str) -> list[Part]:
        """The files of `table`, by month. Raises KeyError for a name that is no table."""
        _ = TABLES[table]
        return sorted(self.manifest.tables.get(table, []), key=lambda part: (part.month, part.path))

    def months(self, table: str) -> list[str]:
        """The months `table` has rows of, such as 2026-11; `unknown` for rows without a time."""
        return [part.month for part in self.parts(table)]

    def rows(self, table: str) -> int:
        """Rows of `table`."""
        return sum(part.rows for part in self.parts(table))

    def table(
        self, name: str, columns: Sequence[str] | None = None, *, months: Iterable[str] | None = None
    ) -> pa.Table:
        """Rows of table `name`, all or of `months`, with `columns` in that order."""
        wanted = None if months is None else set(months)
        parts = [part for part in self.parts(name) if wanted is None or part.month in wanted]
        names = list(columns) if columns is not None else arrow_schema(name).names
        if not parts:
            return empty(name).select(names)
        try:
            read = [
                pq.read_table(self.directory / part.path, columns=names, partitioning=None).select(names)
                for part in parts
            ]
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"a table cannot be read: {error}", where=str(self.directory)) from error
        return pa.concat_tables(read).replace_schema_metadata(None)

    def joined(self, columns: Sequence[str]) -> pa.Table:
        """`columns` of attempts and attempt_facts side by side, one row an attempt, ordered by attempt_id."""
        connection = self.connection(spill=True)
        named = ", ".join(f'"{column}"' for column in columns)
        query = f"SELECT {named} FROM attempts JOIN attempt_facts USING (attempt_id) ORDER BY attempt_id"
        return connection.sql(query).to_arrow_table()

    def part(self, number: int, *, of: int, columns: Sequence[str]) -> pa.Table:
        """Like `joined`, of the job runs whose id leaves `number` when divided by `of`."""
        connection = self.connection(spill=True)
        named = ", ".join(f'"{column}"' for column in columns)
        query = (
            f"SELECT {named} FROM attempts JOIN attempt_facts USING (attempt_id) "
            f"WHERE run_id % {int(of)} = {int(number)} ORDER BY run_id, life, attempt_id"
        )
        return connection.sql(query).to_arrow_table()

    def connection(self, *, spill: bool = False) -> duckdb.DuckDBPyConnection:
        """A connection with a view for each table, which opens no file outside the directory and writes nothing.

        Sources that name no cluster are of the only one that others name: a node is not counted twice. With `spill`
        large joins may use temporary files in the directory.
        """
        connection = duckdb.connect(":memory:", config={"threads": _THREADS, "memory_limit": _MEMORY})
        temporary = self.directory / ".spill"
        connection.execute(f"SET temp_directory = {quoted(str(temporary) if spill else '')}")
        connection.execute(f"SET allowed_directories = [{quoted(str(self.directory) + '/')}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET TimeZone = 'UTC'") if _has_zones(connection) else None
        only = self._only_cluster(connection)
        for name in TABLES:
            connection.execute(f"CREATE VIEW {name} AS {self._select(name, only)}")
        connection.execute("SET lock_configuration = true")
        return connection

    def _only_cluster(self, connection: duckdb.DuckDBPyConnection) -> str:
        """The one cluster that any source names; empty if none or several do."""
        asked = [
            f"SELECT cluster FROM ({self._select(name)})"
            for name in TABLES
            if "cluster" in arrow_schema(name).names and self.parts(name)
        ]
        if not asked:
            return ""
        union = " UNION ALL ".join(asked)
        named = connection.execute(f"SELECT DISTINCT cluster FROM ({union}) WHERE cluster <> '' LIMIT 2").fetchall()
        return str(named[0][0]) if len(named) == 1 else ""

    def _select(self, name: str, cluster: str = "") -> str:
        """The query behind the view of a table; a table without files has its columns and no rows. `cluster` stands
        where no source named one."""
        files = [quoted(str(self.directory / part.path)) for part in self.parts(name)]
        if files:
            filled = f"REPLACE (CASE cluster WHEN '' THEN {quoted(cluster)} ELSE cluster END AS cluster)"
            columns = f"* {filled}" if cluster and "cluster" in arrow_schema(name).names else "*"
            return f"SELECT {columns} FROM read_parquet([{', '.join(files)}], hive_partitioning = false)"
        columns = ", ".join(
            f'CAST(NULL AS {_SQL_TYPES[str(field.type)]}) AS "{field.name}"' for field in arrow_schema(name)
        )
        return f"SELECT {columns} WHERE false"


_SQL_TYPES = {
    "int64": "BIGINT",
    "int32": "INTEGER",
    "string": "VARCHAR",
    "timestamp[us]": "TIMESTAMP",
    "bool": "BOOLEAN",
    "double": "DOUBLE",
}


def _has_zones(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether the build of DuckDB knows time zones."""
    return bool(connection.execute("SELECT count(*) FROM duckdb_settings() WHERE name = 'TimeZone'").fetchall()[0][0])
