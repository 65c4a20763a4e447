"""Files of a trial: what the script writes lands in a scratch directory, what it removes stays.

Python's own ways to write are covered (`open`, `os.open`, pathlib, `torch.save`, directories, renames); a library that
writes by itself is not. A file that is appended to or changed in place is copied first. Reading a path finds the copy.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from keepstep.records.trial import Barred
from keepstep.training.trial_notes import TrialNotes

__all__ = ["ScratchFiles"]

_MOST_COPY_BYTES = 256 * 1024 * 1024
_WRITING = os.O_WRONLY | os.O_RDWR
_FREE = ("/dev/", "/proc/")
_Named = Callable[..., Any]

_lstat, _open, _mkdir = os.lstat, os.open, os.makedirs


class ScratchFiles:
    """Maps paths to copies in `directory` once they are written."""

    def __init__(self, directory: Path, notes: TrialNotes) -> None:
        self._root = os.path.realpath(directory)
        self._notes = notes
        self._told: set[tuple[str, str]] = set()
        self._free = (*_FREE, os.path.dirname(self._root) + os.sep)

    def enter(self) -> None:
        """From now on this process writes into the scratch directory, temporary files too."""
        tempfile.tempdir = os.path.join(self._root, "tmp")
        _mkdir(tempfile.tempdir, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir
        builtins.open = io.open = self._opener(io.open)
        os.open = self._os_opener(os.open)
        for name in ("mkdir", "truncate"):
            setattr(os, name, self._maker(getattr(os, name)))
        for name in ("stat", "lstat", "listdir", "scandir", "access"):
            setattr(os, name, self._reader(getattr(os, name)))
        for name in ("remove", "unlink", "rmdir"):
            setattr(os, name, self._remover(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._renamer(getattr(os, name)))
        for name in ("utime", "chmod"):
            setattr(os, name, self._changer(getattr(os, name)))
        torch.save = self._saver(torch.save)

    def _inside(self, path: Any) -> str | None:
        """The place of `path` in the scratch directory; None where it may stay as it is."""
        if isinstance(path, int) or path is None:
            return None
        given = os.path.abspath(os.fsdecode(path))
        if given.startswith(self._free):
            return None
        return self._root + given

    def _there(self, path: Any) -> str | None:
        """The scratch copy of `path`, if there is one."""
        place = self._inside(path)
        if place is not None and _exists(place):
            return place
        return None

    def _for_writing(self, path: Any, *, fresh: bool) -> Any:
        """Where to write instead of `path`."""
        place = self._inside(path)
        if place is None:
            return path
        self._tell("write", path)
        if not _exists(place):
            parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))
            if _exists(parent) or _exists(os.path.dirname(place)):
                _mkdir(os.path.dirname(place), exist_ok=True)
            if not fresh:
                _copy(os.fsdecode(path), place)
        return place

    def _tell(self, what: str, path: Any) -> None:
        name = os.fsdecode(path)
        if (what, name) not in self._told:
            self._told.add((what, name))
            self._notes.keep(Barred(what, name, self._notes.site()))

    def _opener(self, original: _Named) -> _Named:
        def open(file: Any, mode: str = "r", *args: Any, **others: Any) -> Any:  # noqa: A001
            if "opener" in others and others["opener"] is not None:
                return original(file, mode, *args, **others)
            if any(letter in mode for letter in "wax+"):
                if "x" in mode and self._inside(file) and _exists(os.fsdecode(file)):
                    return original(file, mode, *args, **others)  # raises FileExistsError
                return original(self._for_writing(file, fresh="w" in mode or "x" in mode), mode, *args, **others)
            return original(self._there(file) or file, mode, *args, **others)

        return open

    def _os_opener(self, original: _Named) -> _Named:
        def open(path: Any, flags: int, *args: Any, **others: Any) -> int:  # noqa: A001
            if flags & _WRITING and not (others.get("dir_fd") or flags & getattr(os, "O_TMPFILE", 0) == os.O_TMPFILE):
                if flags & os.O_EXCL and self._inside(path) and _exists(os.fsdecode(path)):
                    return original(path, flags, *args, **others)
                return original(self._for_writing(path, fresh=bool(flags & os.O_TRUNC)), flags, *args, **others)
            return original(self._there(path) or path, flags, *args, **others)

        return open

    def _maker(self, original: _Named) -> _Named:
        def make(path: Any, *args: Any, **others: Any) -> Any:
            place = self._inside(path)
            if place is None or _exists(os.fsdecode(path)):
                return original(path, *args, **others)
            _mkdir(os.path.dirname(place), exist_ok=True)
            return original(place, *args, **others)

        return make

    def _reader(self, original: _Named) -> _Named:
        def read(path: Any = ".", *args: Any, **others: Any) -> Any:
            return original(self._there(path) or path, *args, **others)

        return read

    def _remover(self, original: _Named) -> _Named:
        def remove(path: Any, *args: Any, **others: Any) -> None:
            if others.get("dir_fd") is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{others.pop('dir_fd')}"), os.fsdecode(path))
            place = self._there(path)
            if place is not None:
                original(place)
            elif self._inside(path) is None:
                original(path, *args, **others)
            elif _exists(os.fsdecode(path)):
                self._tell("remove", path)
            else:
                original(path, *args, **others)

        return remove

    def _renamer(self, original: _Named) -> _Named:
        def rename(source: Any, target: Any, *args: Any, **others: Any) -> None:
            place = self._inside(source)
            if place is None and self._inside(target) is None:
                original(source, target, *args, **others)
                return
            origin = self._for_writing(source, fresh=False)
            original(origin, self._for_writing(target, fresh=True))

        return rename

    def _changer(self, original: _Named) -> _Named:
        def change(path: Any, *args: Any, **others: Any) -> Any:
            place = self._there(path)
            if place is not None or self._inside(path) is None:
                return original(place or path, *args, **others)
            self._tell("write", path)
            return None

        return change

    def _saver(self, original: _Named) -> _Named:
        def save(obj: Any, f: Any, *args: Any, **others: Any) -> Any:
            if isinstance(f, (str, os.PathLike)):
                f = self._for_writing(f, fresh=True)
            return original(obj, f, *args, **others)

        return save


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _copy(source: str, place: str) -> None:
    """Copy an ordinary file that is not too large; anything else begins empty."""
    with contextlib.suppress(OSError):
        about = _lstat(source)
        if stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_COPY_BYTES:
            shutil.copyfile(source, place)
