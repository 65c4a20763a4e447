"""`keepstep fleet import`: files of other tools become the tables of a fleet directory, once each."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import pyarrow as pa
import xxhash

from keepstep.errors import KeepstepError, RecordError, UsageError
from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.fleet_sources import ReadAs, read_source
from keepstep.intake.local_times import check_zone, moment_of
from keepstep.intake.source_kind import KINDS, kind_of
from keepstep.service.fleet_derive import TAXONOMY, default_taxonomy, derive_again
from keepstep.service.fleet_runs import run_pieces
from keepstep.store.fleet_manifest import Refused, Source, read_manifest
from keepstep.store.fleet_writer import FleetWriter

__all__ = ["ImportSummary", "Reading", "SourceSummary", "import_sources", "reading_of", "summary_text"]

_HEAD_BYTES = 65536
_CHUNK = 1 << 20
_MAX_FILES = 10_000
_ASIDE_STORED = 100_000
"""Rows kept aside that are stored of one source; the rest are counted."""


class SourceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one source. `failed` is why nothing was taken; `known` means it was imported before."""

    path: str
    kind: str = ""
    rows: dict[str, int] = {}
    kept_aside: int = 0
    reasons: dict[str, int] = {}
    bad_bytes: int = 0
    notes: tuple[str, ...] = ()
    known: bool = False
    failed: str = ""


class ImportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an import did: each source, and the rows of the tables afterwards."""

    directory: str
    sources: tuple[SourceSummary, ...]
    tables: dict[str, int]
    notes: tuple[str, ...] = ()


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for all sources of an import: see ReadAs."""

    zone: str = ""
    cluster: str = ""
    node: str = ""
    at: int | None = None
    good: bytes = b""


def import_sources(
    paths: Sequence[Path], into: Path, *, reading: Reading, say: Callable[[str], None] = lambda _: None
) -> ImportSummary:
    """Imports `paths` (files, keepstep run directories, directories of files) into `into`.

    A source that cannot be read is named in the summary and does not stop the others. `say` is told the progress.
    Raises UsageError for a path that is not there, and StoreError if the disk refuses.
    """
    files = list(_files(paths))
    writer = FleetWriter(into)
    if not (into / TAXONOMY).exists():
        (into / TAXONOMY).write_text(default_taxonomy())
    known = {source.content for source in writer.manifest.sources}
    summaries, sources = [], []
    notes: tuple[str, ...] = ()
    try:
        for number, path in enumerate(files, 1):
            say(f"{number} of {len(files)}: {path}")
            summary, source = _one(path, writer, reading=reading, known=known)
            summaries.append(summary)
            if source is not None:
                sources.append(source)
                known.add(source.content)
        told = _refused(writer.manifest.refused, summaries)
        changed, writer.manifest.refused = told != writer.manifest.refused, told
        fresh = bool(sources) or not writer.manifest.generation
        if fresh:
            say("merging")
            old = writer.forget(_read_otherwise(writer.manifest.sources, sources))
            writer.commit(sources, old=old)
        elif changed:
            writer.show([])
    finally:
        writer.close()
    if fresh:
        say("deriving causes and job runs")
        notes = derive_again(into)
    tables = {name: sum(part.rows for part in parts) for name, parts in read_manifest(into).tables.items()}
    return ImportSummary(directory=str(into), sources=tuple(summaries), tables=tables, notes=notes)


def reading_of(*, timezone: str, cluster: str, node: str, at: str, good: Path | None) -> Reading:
    """Settings as a person gives them. Raises UsageError for a zone or time that is none, or a file not there."""
    moment = moment_of(at) if at else None
    if at and moment is None:
        raise UsageError(f"no time with an offset: {at!r}", remedy="for example 2026-11-29T15:00:00+01:00")
    if good is not None and not good.is_file():
        raise UsageError("no such file", where=str(good))
    return Reading(
        zone=check_zone(timezone) if timezone else "",
        cluster=cluster,
        node=node,
        at=moment,
        good=good.read_bytes() if good is not None else b"",
    )


def summary_text(summary: ImportSummary, *, json: bool) -> str:
    """What an import did, for people or as JSON."""
    if json:
        return msgspec.json.encode(summary).decode()
    lines = []
    for source in summary.sources:
        if source.failed:
            lines.append(f"{source.path}: not taken: {source.failed}")
        elif source.known:
            lines.append(f"{source.path}: imported before")
        else:
            rows = ", ".join(f"{name} {count}" for name, count in source.rows.items()) or "nothing"
            lines.append(f"{source.path}: {KINDS[source.kind]}: {rows}")
        lines += [f"  kept aside {count}: {reason}" for reason, count in source.reasons.items()]
        lines += [f"  {source.bad_bytes} bytes were no text"] if source.bad_bytes else []
        lines += [f"  {note}" for note in source.notes]
    lines += [f"  {note}" for note in summary.notes]
    lines.append(f"{summary.directory}: " + ", ".join(f"{name} {count}" for name, count in summary.tables.items()))
    return "\n".join(lines)


def _read_otherwise(before: Sequence[Source], now: Sequence[Source]) -> set[int]:
    """Sources with the bytes of a new one that were read with other settings: their rows make place for the new."""
    fresh = {source.content.split("-")[0] for source in now}
    return {source.source_id for source in before if source.content.split("-")[0] in fresh}


def _refused(before: Sequence[Refused], now: Sequence[SourceSummary]) -> list[Refused]:
    """The files of which nothing is in the tables, with those of this import."""
    given = {summary.path for summary in now}
    fresh = [Refused(one.path, one.failed.split(" -> ")[0][:300]) for one in now if one.failed]
    return ([one for one in before if one.path not in given] + fresh)[-_MAX_FILES:]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files behind `paths`, in order."""
    count = 0
    for path in paths:
        if not path.exists():
            raise UsageError("no such file or directory", where=str(path))
        if path.is_dir() and (path / "journal.jsonl").is_file():
            found = [path / "journal.jsonl"]
        elif path.is_dir():
            found = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
        else:
            found = [path]
        count += len(found)
        if count > _MAX_FILES:
            raise UsageError(f"more than {_MAX_FILES} files at once", where=str(path))
        yield from found


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of `path`, unpacked if it is packed with gzip."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as stream:
            yield cast("BinaryIO", stream)


def _content(path: Path, reading: Reading) -> str:
    """Hash of the bytes of `path`, a dash, and the hash of how they are read."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return f"{digest.hexdigest()}-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(reading))}"


def _one(path: Path, writer: FleetWriter, *, reading: Reading, known: set[str]) -> tuple[SourceSummary, Source | None]:
    """Stages one file. The summary always; the source if it is new and could be read."""
    try:
        content = _content(path, reading)
        if content in known:
            return SourceSummary(path=str(path), known=True), None
        with _opened(path) as stream:
            kind = kind_of(stream.read(_HEAD_BYTES))
        if kind is None:
            raise RecordError("not written by a tool that is known here", remedy=f"known: {', '.join(KINDS.values())}")
        source_id = xxhash.xxh3_64_intdigest(content.encode()) >> 1
        with _opened(path) as stream:
            how = ReadAs(
                where=path.name,
                zone=reading.zone or "UTC",
                cluster=reading.cluster,
                node=reading.node,
                at=reading.at,
                good=reading.good,
            )
            pieces = run_pieces(path, how) if kind == "keepstep-journal" else read_source(kind, stream, how=how)
            return _staged(pieces, writer, path=path, kind=kind, identity=(source_id, content, how))
    except KeepstepError as error:
        return SourceSummary(path=str(path), failed=str(error)), None
    except (OSError, EOFError, zlib.error) as error:
        return SourceSummary(path=str(path), failed=f"cannot be read: {error}"), None


def _staged(
    pieces: Iterator[Taken], writer: FleetWriter, *, path: Path, kind: str, identity: tuple[int, str, ReadAs]
) -> tuple[SourceSummary, Source]:
    source_id, content, how = identity
    count = _Count()
    for piece in pieces:
        tables = dict(piece.tables)
        if piece.attempts is not None:
            tables["attempts"] = piece.attempts
        if piece.steps is not None:
            tables["steps"] = piece.steps
        tables["kept_aside"] = _aside(count.room(piece.aside), source_id)
        for name, rows in tables.items():
            writer.stage(name, rows, source_id=source_id)
        count.add(piece, tables)
    notes = count.notes(kind, how)
    rows = {name: number for name, number in count.rows.items() if number and name != "kept_aside"}
    source = Source(
        source_id=source_id,
        path=str(path),
        kind=kind,
        content=content,
        size=path.stat().st_size,
        zone=how.zone,
        cluster=how.cluster,
        rows=rows,
        kept_aside=count.aside,
        bad_bytes=count.bad_bytes,
        notes=notes,
    )
    summary = SourceSummary(
        path=source.path,
        kind=kind,
        rows=rows,
        kept_aside=count.aside,
        reasons=count.reasons,
        bad_bytes=count.bad_bytes,
        notes=notes,
    )
    return summary, source


class _Count:
    """What a source gave so far."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.aside = self.bad_bytes = self.gaps = self.odd = 0
        self.reasons: dict[str, int] = {}
        self.said: list[str] = []

    def room(self, aside: Sequence[Aside]) -> Sequence[Aside]:
        """Those of `aside` that are stored."""
        return aside[: max(_ASIDE_STORED - self.aside, 0)]

    def add(self, piece: Taken, tables: dict[str, pa.Table]) -> None:
        """One more piece."""
        for name, rows in tables.items():
            self.rows[name] = self.rows.get(name, 0) + rows.num_rows
        for one in piece.aside:
            reason = one.reason.split(":")[0]
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.aside += len(piece.aside)
        self.bad_bytes += piece.bad_bytes
        self.gaps += piece.gaps
        if piece.attempts is not None and piece.attempts.num_rows:
            self.odd += (
                piece.attempts.num_rows - pa.compute.sum(pa.compute.equal(piece.attempts["time_note"], "")).as_py()
            )
        self.said += piece.notes

    def notes(self, kind: str, how: ReadAs) -> tuple[str, ...]:
        """What a reader of the tables must know about this source."""
        found = list(dict.fromkeys(self.said))
        local = kind in ("sacct", "sacctmgr-events", "scontrol-nodes", "nhc")
        if local and how.zone == "UTC":
            found.append("times without a zone were read as UTC; if the cluster has another one give --timezone")
        if self.gaps:
            found.append(f"{self.gaps} local times do not exist in {how.zone}: that zone is not the cluster's")
        if self.odd:
            found.append(
                f"{self.odd} attempts whose times disagree (a clock jump, or another time zone): see time_note"
            )
        if not any(self.rows.values()) and kind != "empty":
            found.append("nothing in it could be used")
        if self.aside > _ASIDE_STORED:
            found.append(f"of the {self.aside} rows kept aside the first {_ASIDE_STORED} are stored")
        return tuple(found)


def _aside(aside: Sequence[Aside], source_id: int) -> pa.Table:
    rows = [
        {"source_id": source_id, "line": one.line, "reason": one.reason[:300], "excerpt": one.excerpt} for one in aside
    ]
    return taken_rows("kept_aside", rows)
