"""Where the fleet tests find their data, and short ways to import it."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pyarrow as pa

from keepstep.intake.attempt_columns import Taken
from keepstep.intake.fleet_sources import ReadAs, read_source
from keepstep.intake.source_kind import kind_of
from keepstep.service.fleet_import import Reading, import_sources
from keepstep.store.fleet_tables import FleetStore

DATA = Path(__file__).resolve().parents[1] / "data" / "fleet"


def data_bytes(name: str) -> bytes:
    """The bytes of a file, unpacked."""
    raw = (DATA / name).read_bytes()
    return gzip.decompress(raw) if name.endswith(".gz") else raw


def read_text(text: str | bytes, kind: str = "", **how) -> Taken:
    """What a reader takes from `text`, all pieces put together."""
    data = text.encode() if isinstance(text, str) else text
    pieces = list(
        read_source(kind or kind_of(data[:65536]) or "", io.BytesIO(data), how=ReadAs(where="file.txt", **how))
    )
    tables = {
        name: pa.concat_tables([piece.tables[name] for piece in pieces if name in piece.tables])
        for name in {name for piece in pieces for name in piece.tables}
    }
    attempts = [piece.attempts for piece in pieces if piece.attempts is not None]
    steps = [piece.steps for piece in pieces if piece.steps is not None]
    return Taken(
        pa.concat_tables(attempts) if attempts else None,
        pa.concat_tables(steps) if steps else None,
        tuple(one for piece in pieces for one in piece.aside),
        sum(piece.gaps for piece in pieces),
        sum(piece.bad_bytes for piece in pieces),
        tables,
        tuple(note for piece in pieces for note in piece.notes),
    )


def fleet_of(directory: Path, *files: Path, **reading) -> FleetStore:
    """A fleet directory with `files` in it."""
    summary = import_sources(list(files), directory, reading=Reading(**reading))
    assert [source.failed for source in summary.sources if source.failed] == []
    return FleetStore(directory)


def written(folder: Path, name: str, text: str) -> Path:
    """A file with `text`."""
    path = folder / name
    path.write_text(text)
    return path


def rows_of(table: pa.Table, *columns: str) -> list[tuple]:
    """The rows of `table` as tuples of `columns`."""
    return list(zip(*(table[column].to_pylist() for column in columns), strict=True))


def asked(store: FleetStore, query: str) -> list[tuple]:
    """The rows of a query."""
    return store.connection().execute(query).fetchall()
