"""Baselines on disk: a run leaves its own, the next run of the same script finds it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from keepstep.errors import UsageError
from keepstep.service.run_directory import RUN_FILE, read_run

__all__ = ["BASELINE_FILE", "KeptBaseline", "earlier_baseline", "keep_baseline"]

BASELINE_FILE = "baseline.json"
_MOST_RUNS = 50
_MOST_BYTES = 1 << 20


class KeptBaseline(msgspec.Struct, frozen=True):
    """The baseline of `run`, as the analysis encoded it (empty: none was found)."""

    run: str = ""
    data: bytes = b""


def keep_baseline(directory: Path, kept: KeptBaseline) -> None:
    """Leave a baseline in a run directory; a disk that is full costs it and nothing else."""
    if kept.data:
        with contextlib.suppress(OSError):
            (directory / BASELINE_FILE).write_bytes(msgspec.json.encode(kept) + b"\n")


def earlier_baseline(directory: Path, *, script: str, arguments: tuple[str, ...]) -> KeptBaseline:
    """The newest baseline that a run beside `directory` left, of the same script with the same arguments."""
    try:
        beside = [path for path in directory.parent.iterdir() if path != directory and (path / RUN_FILE).is_file()]
        newest = sorted(beside, key=lambda path: path.stat().st_mtime, reverse=True)[:_MOST_RUNS]
    except OSError:
        return KeptBaseline()
    for path in newest:
        with contextlib.suppress(UsageError, OSError, msgspec.DecodeError, msgspec.ValidationError):
            facts = read_run(path)
            file = path / BASELINE_FILE
            if (facts.script, facts.arguments) == (script, arguments) and file.stat().st_size <= _MOST_BYTES:
                return msgspec.json.decode(file.read_bytes(), type=KeptBaseline)
    return KeptBaseline()
