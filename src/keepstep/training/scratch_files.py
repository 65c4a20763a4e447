"""Files that a script writes in a trial or a rehearsal land in a scratch directory; what it removes or changes stays.

Python's own ways to write are covered (`open`, `os`, `pathlib`, `shutil`) and `torch.save`; native code that opens
files by itself, child processes and the network are not. A file that is appended to or changed in place is copied
first, and reading a path finds the copy.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["ScratchFiles"]

_WRITES = set("wax+")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_THROUGH = ("/dev/", "/proc/", "/sys/")
_MOST_COPIED_BYTES = 256 * 1024 * 1024
_READERS = ("stat", "lstat", "listdir", "scandir", "access")
_REMOVERS = ("remove", "unlink", "rmdir")
_CHANGERS = ("chmod", "chown", "utime")
_MOVERS = ("rename", "replace", "link")
_Named = Callable[..., Any]


def _none_free(path: str) -> bool:
    return False


def _untold(what: str, path: str) -> None:
    """Nobody wants to know."""


class ScratchFiles:
    """Between `enter` and `leave` this process writes to `directory`, which must be there.

    `free` says of an absolute path that it is the process's own to write (caches); `told` gets "write" or "remove" and
    the path, each time something is kept from the world.
    """

    def __init__(
        self,
        directory: Path,
        *,
        free: Callable[[str], bool] = _none_free,
        told: Callable[[str, str], None] = _untold,
    ) -> None:
        self._root = os.path.realpath(directory)
        self._free = free
        self._told = told
        self._originals: list[tuple[Any, str, Any]] = []
        self._open, self._lstat, self._mkdir = io.open, os.lstat, os.mkdir

    def enter(self) -> None:
        """From now on."""
        self._replace(builtins, "open", value=self._opener(io.open))
        self._replace(io, "open", value=builtins.open)
        self._replace(os, "open", value=self._os_opener(os.open))
        self._replace(torch._C, "PyTorchFileWriter", value=self._saver(torch._C.PyTorchFileWriter))
        makers: list[tuple[tuple[str, ...], Callable[[_Named], _Named]]] = [
            (("mkdir",), self._maker),
            (("truncate",), self._cutter),
            (_READERS, self._reader),
            (_REMOVERS, self._remover),
            (_CHANGERS, self._changer),
            (_MOVERS, self._mover),
            (("symlink",), self._linker),
        ]
        for names, maker in makers:
            for name in names:
                self._replace(os, name, value=maker(getattr(os, name)))

    def leave(self) -> None:
        """All as it was; the directory stays."""
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)
        self._originals.clear()

    def _replace(self, owner: Any, name: str, *, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    # ------------------------------------------------------------------ paths

    def _inside(self, path: Any) -> str:
        """The place of `path` in the scratch directory; empty where it may stay as it is (descriptors, devices)."""
        if isinstance(path, int) or path is None:
            return ""
        full = os.path.abspath(os.fsdecode(path))
        if full.startswith((*_THROUGH, self._root)) or self._free(full):
            return ""
        return self._root + full

    def _exists(self, path: Any) -> bool:
        try:
            self._lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def _there(self, path: Any) -> str:
        """The scratch copy of `path`, empty where there is none."""
        place = self._inside(path)
        return place if place and self._exists(place) else ""

    def _for_writing(self, path: Any, *, fresh: bool) -> Any:
        """Where to write instead of `path`; its present contents are there, unless it is `fresh`."""
        place = self._inside(path)
        if not place:
            return path
        self._told("write", os.fsdecode(path))
        if self._exists(place):
            return place
        self._make_parents(path, place)
        if not fresh:
            self._copy(path, place)
        return place

    def _make_parents(self, path: Any, place: str) -> None:
        """The directories above `place`, if `path` has a directory, so that a missing one is missed as ever."""
        above = Path(place).parent
        if not self._exists(os.path.dirname(os.path.abspath(os.fsdecode(path)))):
            return
        for one in reversed([above, *above.parents]):
            if not self._exists(one):
                self._mkdir(one)

    def _copy(self, path: Any, place: str) -> None:
        """Copy an ordinary file that is not too large; anything else begins empty."""
        with contextlib.suppress(OSError):
            about = os.stat(path)
            if stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_COPIED_BYTES:
                with self._open(path, "rb") as source, self._open(place, "wb") as target:
                    shutil.copyfileobj(source, target)

    # ------------------------------------------------------------------ what is called instead

    def _opener(self, original: _Named) -> _Named:
        def opened(file: Any, mode: str = "r", *rest: Any, **words: Any) -> Any:
            taken = mode[:1] == "x" and self._exists(file) and not self._there(file)
            if words.get("opener") is not None or taken:  # `taken` raises FileExistsError
                return original(file, mode, *rest, **words)
            if _WRITES & set(mode):
                return original(self._for_writing(file, fresh=mode[:1] in "wx"), mode, *rest, **words)
            return original(self._there(file) or file, mode, *rest, **words)

        return opened

    def _os_opener(self, original: _Named) -> _Named:
        def opened(path: Any, flags: int, *rest: Any, **words: Any) -> int:
            unnamed = _UNNAMED and flags & _UNNAMED == _UNNAMED
            taken = flags & os.O_EXCL and self._exists(path) and not self._there(path)
            if unnamed or words.get("dir_fd") is not None or taken:
                return int(original(path, flags, *rest, **words))
            if flags & _WRITING:
                return int(original(self._for_writing(path, fresh=bool(flags & os.O_TRUNC)), flags, *rest, **words))
            return int(original(self._there(path) or path, flags, *rest, **words))

        return opened

    def _maker(self, original: _Named) -> _Named:
        def made(path: Any, *rest: Any, **words: Any) -> None:
            place = self._inside(path)
            if not place or words.get("dir_fd") is not None or self._exists(path):
                original(path, *rest, **words)
                return
            self._make_parents(path, place)
            original(place, *rest, **words)

        return made

    def _cutter(self, original: _Named) -> _Named:
        def cut(path: Any, *rest: Any, **words: Any) -> None:
            original(self._for_writing(path, fresh=False), *rest, **words)

        return cut

    def _reader(self, original: _Named) -> _Named:
        def read(path: Any = ".", *rest: Any, **words: Any) -> Any:
            relative = words.get("dir_fd") is not None
            return original((not relative and self._there(path)) or path, *rest, **words)

        return read

    def _remover(self, original: _Named) -> _Named:
        def removed(path: Any, *rest: Any, **words: Any) -> None:
            folder = words.get("dir_fd")
            full = path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
            place = self._inside(full)
            if place and self._exists(place):
                original(place)
            elif place and self._exists(full):
                self._told("remove", os.fsdecode(full))
            else:
                original(path, *rest, **words)

        return removed

    def _changer(self, original: _Named) -> _Named:
        def changed(path: Any, *rest: Any, **words: Any) -> None:
            place = self._inside(path)
            if place and self._exists(place):
                original(place, *rest, **words)
            elif place and self._exists(path):
                self._told("write", os.fsdecode(path))
            else:
                original(path, *rest, **words)

        return changed

    def _mover(self, original: _Named) -> _Named:
        def moved(source: Any, target: Any, *rest: Any, **words: Any) -> None:
            if not self._inside(source) and not self._inside(target):
                original(source, target, *rest, **words)
            else:
                original(self._for_writing(source, fresh=False), self._for_writing(target, fresh=True))

        return moved

    def _linker(self, original: _Named) -> _Named:
        def linked(source: Any, target: Any, *rest: Any, **words: Any) -> None:
            original(self._there(source) or source, self._for_writing(target, fresh=True), *rest, **words)

        return linked

    def _saver(self, original: _Named) -> _Named:
        def saved(file: Any, *rest: Any, **words: Any) -> Any:
            named = isinstance(file, (str, os.PathLike))
            return original(self._for_writing(file, fresh=True) if named else file, *rest, **words)

        return saved
