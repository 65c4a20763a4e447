"""Which files a diagnosis reads: paths as given, directories below them, nothing outside them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.errors import UsageError
from keepstep.records.evidence import Unread
from keepstep.service.bundles import BUNDLES_FOLDER, FINDING_FILE
from keepstep.service.run_directory import RUN_FILE
from keepstep.store.journal import JOURNAL_NAME

__all__ = ["MOST_FILES", "Inputs", "find_inputs"]

MOST_FILES = 100_000
"""Files of one diagnosis; a job of 16,384 ranks has a few each."""
_DEEPEST = 32
_NOT_EVIDENCE = frozenset(
    {"run.lock", "token", "LICENSE", "LICENSE.txt", "LICENCE", "NOTICE", ".gitignore", ".DS_Store"}
)
_OF_BUNDLE = (FINDING_FILE, ".counters.json")
"""What a bundle says in keepstep's own words: of a finding that is in the journal, and no lines of a log."""


class Inputs(msgspec.Struct):
    """What was found: single files, directories of keepstep runs, and what cannot be read."""

    files: list[Path]
    runs: list[Path]
    unread: list[Unread]


def find_inputs(paths: list[Path]) -> Inputs:
    """Everything below `paths` that may be evidence, in order of names; a path given twice counts once.

    A link that leads out of the directory given is named and not followed: what is beside a job's files may be another
    job's. Raises UsageError if a path does not exist or there is nothing at all.
    """
    inputs = Inputs([], [], [])
    seen: set[Path] = set()
    for path in paths:
        try:
            kind = path.stat().st_mode
        except OSError as error:
            raise UsageError(
                f"cannot be read: {error.strerror}", where=str(path), remedy="give existing files"
            ) from error
        found = _below(path, inputs) if stat.S_ISDIR(kind) else iter([path])
        for file in found:
            if (real := file.resolve()) not in seen:
                seen.add(real)
                _sort_in(file, inputs)
    if not inputs.files and not inputs.runs:
        if inputs.unread:
            return inputs
        where = ", ".join(str(path) for path in paths[:3])
        raise UsageError("nothing to read", where=where, remedy="give logs, dumps, stacks or a run directory")
    return inputs


def _below(directory: Path, inputs: Inputs) -> Iterator[Path]:
    """Files below a directory. A directory of a keepstep run is taken as one thing; its logs are files."""
    root = directory.resolve()
    waiting = [(directory, 0)]
    while waiting:
        here, depth = waiting.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            inputs.unread.append(Unread(path=str(here), why=error.strerror or "cannot be listed"))
            continue
        names = {entry.name for entry in entries}
        run = JOURNAL_NAME in names or RUN_FILE in names
        if run:
            inputs.runs.append(here)
        bundle = here.name.isdigit() and here.parent.name == BUNDLES_FOLDER
        folders = []
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink() and not _inside(path, root):
                inputs.unread.append(Unread(path=str(path), why="a link that leads out of the directory given"))
            elif entry.is_dir():
                if (not run or entry.name in ("logs", "incidents", "findings")) and depth < _DEEPEST:
                    folders.append((path, depth + 1))
            elif not run and entry.name not in _NOT_EVIDENCE and not (bundle and entry.name.endswith(_OF_BUNDLE)):
                yield path
        waiting.extend(reversed(folders))


def _inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _sort_in(path: Path, inputs: Inputs) -> None:
    """A file that can be opened, or why not."""
    try:
        mode, size = path.stat().st_mode, path.stat().st_size
    except OSError as error:
        inputs.unread.append(Unread(path=str(path), why=error.strerror or "cannot be read"))
        return
    if not stat.S_ISREG(mode):
        inputs.unread.append(Unread(path=str(path), why="not a file: a device, socket or pipe"))
    elif not size:
        inputs.unread.append(Unread(path=str(path), why="empty"))
    elif len(inputs.files) >= MOST_FILES:
        inputs.unread.append(Unread(path=str(path), why=f"more than {MOST_FILES} files were given"))
    else:
        inputs.files.append(path)
