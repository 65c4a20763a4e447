"""What `os.scandir` gives for a directory that lies in two layers."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any

from keepstep.training.scratch_layers import REAL
from keepstep.training.scratch_redirect import Redirect

__all__ = ["ScratchEntries", "ScratchEntry"]


class ScratchEntry:
    """As `os.DirEntry`. `full` is its full path for the script, `shown` what it is called below the scanned one."""

    def __init__(self, redirect: Redirect, full: str, *, shown: Any) -> None:
        self.path = shown
        self.name = os.path.basename(shown)
        self._redirect, self._full = redirect, full

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.stat` of it."""
        full = self._redirect.paths.find(self._full) if follow_symlinks else self._full
        found: os.stat_result
        if full:
            found = REAL.lstat(self._redirect.layers.source(full, self.path))
        else:  # it leads to a device, or to what is free
            found = REAL.stat(self._redirect.layers.source(self._full, self.path))
        return found

    def inode(self) -> int:
        """Its number on the disk."""
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._is(stat.S_ISLNK, follow=False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is, or leads to, a directory."""
        return self._is(stat.S_ISDIR, follow=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is, or leads to, an ordinary file."""
        return self._is(stat.S_ISREG, follow=follow_symlinks)

    def is_junction(self) -> bool:
        """Never, here."""
        return False

    def _is(self, kind: Any, *, follow: bool) -> bool:
        try:
            return bool(kind(self.stat(follow_symlinks=follow).st_mode))
        except FileNotFoundError:
            return False


class ScratchEntries:
    """As the iterator that `os.scandir` gives."""

    def __init__(self, entries: Iterable[ScratchEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[ScratchEntry]:
        return self

    def __next__(self) -> ScratchEntry:
        return next(self._entries)

    def __enter__(self) -> ScratchEntries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No further entry comes."""
        self._entries = iter(())
