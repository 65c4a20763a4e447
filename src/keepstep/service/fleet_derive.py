"""Makes the derived tables of a fleet directory again: after an import, or when the site has edited the taxonomy."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import xxhash

from keepstep.errors import EnvironmentProblem, UsageError
from keepstep.fleet.derived import derive
from keepstep.fleet.drain_times import with_set_times
from keepstep.fleet.node_shares import spread
from keepstep.fleet.run_matches import match_runs, named_jobs, without_matched
from keepstep.fleet.taxonomy import Taxonomy, parse_taxonomy
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.run_journal import RUN_PARTITION
from keepstep.records.fleet_schema import arrow_schema
from keepstep.store.fleet_tables import FleetStore
from keepstep.store.fleet_writer import FleetWriter

__all__ = ["TAXONOMY", "current", "default_taxonomy", "derive_again", "site_taxonomy", "up_to_date"]

TAXONOMY = "taxonomy.toml"
_MAX_TAXONOMY = 1 << 20


def default_taxonomy() -> str:
    """The taxonomy that comes with keepstep, as TOML."""
    return importlib.resources.files("keepstep.fleet").joinpath(TAXONOMY).read_text()


def site_taxonomy(directory: Path) -> tuple[Taxonomy, str]:
    """The taxonomy of `directory` and its hash; the default one if the site has none.

    Raises UsageError if it is no taxonomy, and EnvironmentProblem if it cannot be read.
    """
    path = directory / TAXONOMY
    try:
        if path.is_file() and path.stat().st_size > _MAX_TAXONOMY:
            raise UsageError(f"a taxonomy of more than {_MAX_TAXONOMY} bytes", where=str(path))
        text = path.read_text() if path.is_file() else default_taxonomy()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"the taxonomy cannot be read: {error}", where=str(path)) from error
    return parse_taxonomy(text, where=str(path)), xxhash.xxh3_64_hexdigest(text.encode())


def up_to_date(directory: Path) -> bool:
    """Whether the derived tables were made from the tables and the taxonomy that are there now."""
    manifest = FleetStore(directory).manifest
    return manifest.derived_from == manifest.generation and manifest.taxonomy == site_taxonomy(directory)[1]


def current(directory: Path) -> FleetStore:
    """The tables of `directory`, with derived tables that fit the base tables and the taxonomy as they are now.

    They are made again if an import was cut off or the taxonomy was edited.
    """
    store = FleetStore(directory)
    if not store.manifest.generation or up_to_date(directory):
        return store
    derive_again(directory)
    return FleetStore(directory)


def derive_again(directory: Path) -> tuple[str, ...]:
    """Makes the derived tables from all that is in `directory`; notes about what could not be used."""
    taxonomy, mark = site_taxonomy(directory)
    writer = FleetWriter(directory)
    try:
        old = _joined(writer, FleetStore(directory))
        writer.show(old)
        nodes, bad = spread(FleetStore(directory).table("attempts", ["attempt_id", "nodes", "gpus"]), expand_hosts)
        writer = FleetWriter(directory)
        writer.show(writer.replace("attempt_nodes", nodes))
        del nodes
        _derived(directory, taxonomy, mark=mark)
    finally:
        writer.close()
    return tuple(f"a list of nodes is not well formed: {text[:60]!r}" for text in bad[:20])


def _joined(writer: FleetWriter, store: FleetStore) -> list[Path]:
    """Joins what two sources say about one thing: begins of drains, and runs that the scheduler knows too."""
    intervals = with_set_times(store.table("node_intervals"))
    old = [] if intervals is None else writer.replace("node_intervals", intervals)
    matched = match_runs(store.connection(), RUN_PARTITION, expand=expand_hosts)
    if matched:
        old += writer.rewrite("attempts", lambda rows: without_matched(rows, RUN_PARTITION, matched=matched))
        for table in ("incidents", "progress"):
            old += writer.rewrite(table, lambda rows: named_jobs(rows, matched))
    return old


def _derived(directory: Path, taxonomy: Taxonomy, *, mark: str) -> None:
    store = FleetStore(directory)
    connection = store.connection(spill=True)
    tables = derive(connection, taxonomy)
    connection.close()
    writer = FleetWriter(directory)
    old = []
    for name, table in tables.items():
        old += writer.replace(name, table.select(arrow_schema(name).names).cast(arrow_schema(name)))
    writer.manifest.taxonomy = mark
    writer.manifest.derived_from = writer.manifest.generation
    writer.show(old)
