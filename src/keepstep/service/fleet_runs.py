"""A keepstep run directory as a source of the fleet: its journal, run.json and the rings kept at each incident."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken
from keepstep.intake.fleet_sources import ReadAs
from keepstep.intake.run_journal import RunNotes, read_run
from keepstep.records.journal_line import MAX_LINE_BYTES
from keepstep.records.ring import Ring, decode_ring
from keepstep.service.run_directory import RUN_FILE, is_running

__all__ = ["run_pieces"]

_MAX_RING_BYTES = 256 * 1024 * 1024
_MAX_RINGS = 2048
_NEWEST = 512
"""Slots of each ring that are looked at: the last steps before the incident."""


def run_pieces(journal: Path, how: ReadAs) -> Iterator[Taken]:
    """What the run of `journal` tells. Raises RecordError for a journal damaged in the middle."""
    directory = journal.parent
    rings = {int(folder.name): _rings(folder) for folder in _folders(directory / "incidents")}
    notes = RunNotes(run=_run_file(directory / RUN_FILE), rings=rings, running=is_running(directory))
    with journal.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        yield read_run(lines, notes=notes, cluster=how.cluster, where=how.where)


def _folders(incidents: Path) -> list[Path]:
    """Folders of incidents, which are numbered."""
    if not incidents.is_dir():
        return []
    return sorted(one for one in incidents.iterdir() if one.is_dir() and one.name.isascii() and one.name.isdigit())


def _rings(folder: Path) -> list[Ring]:
    """The rings in `folder` that can be read."""
    rings = []
    for path in sorted(folder.glob("*.ring"))[:_MAX_RINGS]:
        with contextlib.suppress(RecordError, OSError):
            if path.stat().st_size <= _MAX_RING_BYTES:
                rings.append(decode_ring(path.read_bytes(), newest=_NEWEST))
    return rings


def _run_file(path: Path) -> dict[str, Any]:
    """The fields of run.json; none if it cannot be read."""
    try:
        fields = msgspec.json.decode(path.read_bytes()[:_MAX_RING_BYTES])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
