"""What a fleet directory holds: its sources and the files of every table, in one document replaced in one move."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keepstep.errors import RecordError, SchemaTooNew, StoreError
from keepstep.records.fleet_schema import FLEET_SCHEMA

__all__ = ["MANIFEST", "Manifest", "Part", "Refused", "Source", "read_manifest", "write_manifest"]

MANIFEST = "fleet.json"
_MAX_BYTES = 256 * 1024 * 1024


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was imported: what it is, how much of it was understood, and what its reader noted.

    `content` is the hash of its bytes and of the settings it was read with; `rows` counts rows by table.
    """

    source_id: int
    path: str
    kind: str
    content: str
    size: int
    zone: str = ""
    cluster: str = ""
    rows: dict[str, int] = {}
    kept_aside: int = 0
    bad_bytes: int = 0
    notes: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True):
    """One file of which nothing was taken, and why."""

    path: str
    reason: str


class Part(msgspec.Struct, frozen=True):
    """One Parquet file of a table: its path in the directory, its month (empty: not partitioned), its rows."""

    path: str
    month: str
    rows: int


class Manifest(msgspec.Struct, kw_only=True):
    """The content of `fleet.json`."""

    schema: str = FLEET_SCHEMA
    sources: list[Source] = []
    refused: list[Refused] = []
    """Files that were given and not taken, and were not taken later either."""
    tables: dict[str, list[Part]] = {}
    generation: int = 0
    taxonomy: str = ""
    """Hash of the taxonomy the derived tables were made with."""
    derived_from: int = -1
    """Generation of the base tables the derived tables were made from."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`; an empty one if there is none.

    Raises RecordError if it cannot be read and SchemaTooNew if a newer major version wrote it.
    """
    path = directory / MANIFEST
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise RecordError("the manifest is too large", where=str(path))
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return Manifest()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a fleet manifest: {error}", where=str(path)) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from error
    major = manifest.schema.split(".")[0]
    if not major.isdigit() or int(major) > int(FLEET_SCHEMA.split(".")[0]):
        raise SchemaTooNew(f"fleet tables of schema {manifest.schema[:20]}", where=str(path))
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest: readers see the old one or the new one. Raises StoreError if the disk refuses."""
    path, fresh = directory / MANIFEST, directory / f"{MANIFEST}.new"
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise StoreError(f"cannot be written: {error.strerror}", where=str(path)) from error
