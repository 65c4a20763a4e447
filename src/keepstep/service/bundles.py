"""Evidence bundles: DIR/findings/N/ holds a finding with the rings, stacks and counters of its time.

They are written by a thread, so that nobody waits for a disk.
A bundle belongs to one run of one job and holds nothing of any other.
"""

from __future__ import annotations

import logging
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from keepstep.records.events import Finding
from keepstep.records.watch_messages import EvidenceGiven

__all__ = ["BUNDLES_FOLDER", "FINDING_FILE", "Bundles", "Retention", "trim_bundles"]

BUNDLES_FOLDER = "findings"
FINDING_FILE = "finding.json"
_MOST_RING_BYTES = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_log = logging.getLogger(__name__)


class Retention(msgspec.Struct, frozen=True):
    """How much evidence of a run stays: the newest `count` bundles, of them as many as fit into `max_bytes`."""

    count: int
    max_bytes: int


class Bundles:
    """The bundles of one run. A disk that is full costs evidence and nothing else."""

    def __init__(self, directory: Path, retention: Retention) -> None:
        """Bundles go under `directory`/findings."""
        self._folder = directory / BUNDLES_FOLDER
        self._retention = retention
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="keepstep-bundles")

    def put_finding(self, finding: Finding) -> None:
        """Keep the newest word on a finding."""
        data = msgspec.json.format(msgspec.json.encode(finding), indent=2) + b"\n"
        self._submit(finding.number, FINDING_FILE, data=data)

    def put_evidence(self, node: str, piece: EvidenceGiven) -> None:
        """Keep what an agent gave. Names that are no names are refused."""
        name = piece.member or f"host-{node}"
        if not _NAME.match(name):
            _log.warning("evidence of %r refused: not a name", name[:64])
            return
        if piece.stack:
            self._submit(piece.finding, f"{name}.stack.txt", data=piece.stack.encode())
        if piece.counters:
            self._submit(piece.finding, f"{name}.counters.json", data=piece.counters + b"\n")
        for packed, ending in ((piece.ring, "ring"), (piece.dump, f"rank{piece.rank}.dump")):
            if packed and (whole := _unpacked(packed)):
                self._submit(piece.finding, f"{name}.{ending}", data=whole)

    def close(self) -> None:
        """Wait for what is being written, and trim."""
        self._writer.shutdown(wait=True)
        trim_bundles(self._folder, self._retention)

    def _submit(self, number: int, name: str, *, data: bytes) -> None:
        self._writer.submit(self._write, self._folder / str(number), name, data=data)

    def _write(self, folder: Path, name: str, *, data: bytes) -> None:
        try:
            fresh = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.part"
            part.write_bytes(data)
            part.replace(folder / name)
            if fresh:
                trim_bundles(self._folder, self._retention)
        except OSError as error:
            _log.warning("cannot keep evidence %s: %s", folder / name, error.strerror)


def trim_bundles(folder: Path, retention: Retention) -> list[Path]:
    """Remove the oldest bundles under `folder` that `retention` does not keep; those removed. The newest stays."""
    found = (
        (path for path in folder.iterdir() if path.name.isdigit() and not path.is_symlink()) if folder.is_dir() else ()
    )
    newest_first = sorted(found, key=lambda path: int(path.name), reverse=True)
    total = 0
    removed: list[Path] = []
    for place, path in enumerate(newest_first):
        total += sum(file.stat().st_size for file in path.glob("*") if file.is_file())
        if place and (place >= retention.count or total > retention.max_bytes):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _unpacked(packed: bytes) -> bytes:
    """The bytes as they were; empty for nonsense or what would not fit into memory."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MOST_RING_BYTES)
        return data if unpacker.eof else b""
    except zlib.error:
        return b""
