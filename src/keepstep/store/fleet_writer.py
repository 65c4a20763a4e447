"""Writing a fleet directory: rows are staged, merged month by month with what is there, and shown in one move.

A row that is there already is not written again. Of two versions of one row the one that says that it ended wins,
then the newer; what the winner leaves open is taken from the other. A crash leaves the old tables.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keepstep.errors import StoreError, UsageError
from keepstep.records.fleet_schema import BASE_TABLES, TABLES, arrow_schema, empty
from keepstep.store.disk import disk_error
from keepstep.store.fleet_manifest import Manifest, Part, Source, read_manifest, write_manifest
from keepstep.store.fleet_merge import merged

__all__ = ["FleetWriter"]

_ROW_GROUP = 256 * 1024
_UNIQUE = frozenset({"job_id", "evidence", "message"})
"""Texts of which nearly every one is another."""


class FleetWriter:
    """One import into `directory`, which is made if it is not there. Raises StoreError if the disk refuses."""

    def __init__(self, directory: Path) -> None:
        """Raises UsageError while another process writes into the directory."""
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self.staged: dict[tuple[str, str], list[Path]] = {}
        self.replaced: set[int] = set()
        self.written: list[Path] = []
        self.staging = directory / f".import-{self.manifest.generation + 1}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir()
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError("another import is writing here", where=str(directory), remedy="wait for it") from error
        except OSError as error:
            raise disk_error("cannot be written", directory, error=error) from error

    def stage(self, table: str, rows: pa.Table, *, source_id: int) -> None:
        """Takes `rows` of `table`, which came from `source_id`; they are not visible before `commit`."""
        if not rows.num_rows:
            return
        schema = arrow_schema(table)
        if "source_id" in schema.names:
            index = schema.get_field_index("source_id")
            ids = pa.repeat(pa.scalar(source_id, pa.int64()), rows.num_rows)
            rows = rows.set_column(index, schema.field(index), ids)
        months = _months(table, rows)
        for month in pc.unique(months).to_pylist():
            chosen = rows.filter(pc.equal(months, month))
            files = self.staged.setdefault((table, month), [])
            path = self.staging / f"{table}-{month}-{len(files)}.arrow"
            _stage(chosen, path)
            files.append(path)

    def forget(self, sources: set[int]) -> list[Path]:
        """Takes the rows of `sources` out of all tables of sources; the files no longer needed."""
        old: list[Path] = []
        gone = pa.array(sorted(sources), pa.int64())

        def without(rows: pa.Table) -> pa.Table | None:
            theirs = pc.is_in(rows["source_id"], value_set=gone)
            return rows.filter(pc.invert(theirs)) if pc.any(theirs).as_py() else None

        for table in BASE_TABLES if sources else ():
            old += self.rewrite(table, without)
        self.manifest.sources = [source for source in self.manifest.sources if source.source_id not in sources]
        return old

    def commit(self, sources: list[Source], *, old: list[Path] | None = None) -> None:
        """Merges all that is staged, and shows it together with `sources`.

        Sources with the path of a new one lose what they had kept aside. `old` files are removed too.
        """
        manifest = self.manifest
        paths = {source.path for source in sources}
        self.replaced = {source.source_id for source in manifest.sources if source.path in paths}
        tables = {name: list(parts) for name, parts in manifest.tables.items()}
        if self.replaced and manifest.tables.get("kept_aside"):
            self.staged.setdefault(("kept_aside", ""), [])
        old = list(old or ())
        for (table, month), files in sorted(self.staged.items()):
            parts = tables.setdefault(table, [])
            before = [part for part in parts if part.month == month]
            rows = self._merged(table, files, before=before)
            old += [self.directory / part.path for part in before]
            tables[table] = [part for part in parts if part.month != month]
            if rows.num_rows:
                tables[table].append(self.put(table, month, rows=rows))
        manifest.tables = tables
        manifest.sources = [s for s in manifest.sources if s.source_id not in self.replaced] + sources
        manifest.generation += 1
        self.show(old)

    def show(self, old: list[Path]) -> None:
        """Makes what was put visible, and removes the files that it replaces."""
        write_manifest(self.directory, self.manifest)
        for path in old:
            path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Drops what was staged and not committed, and lets others write."""
        shutil.rmtree(self.staging, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def replace(self, table: str, rows: pa.Table) -> list[Path]:
        """Puts `rows` in place of the whole of `table`; the files that are no longer needed."""
        old = [self.directory / part.path for part in self.manifest.tables.get(table, [])]
        self.manifest.tables[table] = [self.put(table, "", rows=rows)] if rows.num_rows else []
        return old

    def rewrite(self, table: str, change: Callable[[pa.Table], pa.Table | None]) -> list[Path]:
        """Puts `change(rows)` in place of each file of `table`, where it is not None; the files no longer needed."""
        old, parts = [], []
        for part in self.manifest.tables.get(table, []):
            rows = change(pq.read_table(self.directory / part.path, partitioning=None))
            if rows is None:
                parts.append(part)
                continue
            old.append(self.directory / part.path)
            if rows.num_rows:
                parts.append(self.put(table, part.month, rows=rows))
        if old:
            self.manifest.tables[table] = parts
        return old

    def put(self, table: str, month: str, *, rows: pa.Table) -> Part:
        """Writes `rows` as one file of `table`; it is visible once a manifest names it."""
        folder = Path("tables") / table / (f"month={month}" if month else "all")
        path = folder / f"part-{self.manifest.generation + 1:06d}.parquet"
        try:
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot be written: {error.strerror}", where=str(folder)) from error
        while (self.directory / path).exists():
            path = path.with_name(f"{path.stem}x.parquet")
        _write(rows.cast(arrow_schema(table)), self.directory / path)
        return Part(str(path), month, rows.num_rows)

    def _merged(self, table: str, files: list[Path], *, before: list[Part]) -> pa.Table:
        """What is there and what is staged, each row once."""
        there = [pq.read_table(self.directory / part.path, partitioning=None) for part in before]
        if table == "kept_aside" and self.replaced:
            gone = pa.array(sorted(self.replaced), pa.int64())
            there = [rows.filter(pc.invert(pc.is_in(rows["source_id"], value_set=gone))) for rows in there]
        fresh = [_staged(path) for path in files]
        rows = pa.concat_tables([empty(table), *there, *fresh])
        return merged(table, rows)


def _stage(rows: pa.Table, path: Path) -> None:
    """Writes rows that are read once more, by this process: as they lie in memory."""
    try:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as out:
            out.write_table(rows)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"cannot be written: {error}", where=str(path)) from error


def _staged(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _write(rows: pa.Table, path: Path) -> None:
    """Numbers without a dictionary: building one of ids and times costs more than it saves."""
    repeated = [field.name for field in rows.schema if pa.types.is_string(field.type) and field.name not in _UNIQUE]
    try:
        pq.write_table(
            rows,
            path,
            compression="zstd",
            compression_level=1,
            row_group_size=_ROW_GROUP,
            use_dictionary=repeated,
        )
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"cannot be written: {error}", where=str(path)) from error


def _months(table: str, rows: pa.Table) -> pa.Array:
    """The month each row belongs to, by the first of its times that is known."""
    names = TABLES[table].month_of
    if not names:
        return pa.repeat(pa.scalar("", pa.string()), rows.num_rows)
    time = pc.coalesce(*(rows[name] for name in names)).combine_chunks()
    number = np.asarray(pc.fill_null(time.cast(pa.int64()), np.iinfo(np.int64).min))
    months = number.view("datetime64[us]").astype("datetime64[M]")
    unique, inverse = np.unique(months, return_inverse=True)
    words = ["unknown" if np.isnat(month) else str(month) for month in unique]
    return pa.array(words, pa.string()).take(pa.array(inverse))
