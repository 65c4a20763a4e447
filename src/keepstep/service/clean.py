"""Retention: which run directories go, and their removal."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.errors import EnvironmentProblem, UsageError
from keepstep.service.bundles import BUNDLES_FOLDER, Retention, trim_bundles
from keepstep.service.run_directory import CANARY_FOLDER, RUN_FILE, is_running, read_run

__all__ = ["FoundRun", "chosen_for_removal", "remove_old_evidence", "remove_old_runs"]


class FoundRun(msgspec.Struct, frozen=True):
    """A run on disk; `created` in wall-clock seconds, `size` in bytes."""

    path: Path
    created: float
    size: int
    running: bool


def chosen_for_removal(runs: Sequence[FoundRun], *, keep: int, max_bytes: int | None) -> list[FoundRun]:
    """The runs that go, oldest first: all but the `keep` newest, then more until at most `max_bytes` stay."""
    newest_first = sorted(runs, key=lambda run: run.created, reverse=True)
    left = sum(run.size for run in runs)
    chosen: list[FoundRun] = []
    for number in range(len(newest_first) - 1, -1, -1):
        run = newest_first[number]
        if not run.running and (number >= keep or (max_bytes is not None and left > max_bytes)):
            chosen.append(run)
            left -= run.size
    return chosen


def remove_old_runs(run_root: Path, *, keep: int, max_bytes: int | None) -> list[Path]:
    """Remove runs under `run_root`; the paths removed. Raises UsageError, and EnvironmentProblem if one cannot go."""
    if not run_root.is_dir():
        raise UsageError("no such directory", where=str(run_root), remedy="give --run-root DIR")
    removed: list[Path] = []
    for run in chosen_for_removal(_runs(run_root), keep=keep, max_bytes=max_bytes):
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            raise EnvironmentProblem(f"cannot remove: {error.strerror}", where=str(run.path)) from error
        removed.append(run.path)
    return removed


def remove_old_evidence(run_root: Path, retention: Retention) -> list[Path]:
    """Remove evidence bundles that `retention` does not keep from the runs under `run_root` that are over."""
    if not run_root.is_dir():
        return []
    over = (run.path for run in _runs(run_root) if not run.running)
    return [gone for path in over for gone in trim_bundles(path / BUNDLES_FOLDER, retention)]


def _runs(run_root: Path) -> list[FoundRun]:
    """Every real directory (no link) directly under `run_root` with a readable run.json, or with that of a canary
    behind which no job began."""
    found: list[FoundRun] = []
    for path in sorted(run_root.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        told = path if (path / RUN_FILE).is_file() else path / CANARY_FOLDER
        if (told / RUN_FILE).is_file():
            with contextlib.suppress(UsageError):
                running = is_running(path) or is_running(told)
                found.append(FoundRun(path, read_run(told).created, _size(path), running))
    return found


def _size(directory: Path) -> int:
    """Bytes that the files of `directory` take on the disk."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total
