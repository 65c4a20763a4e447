"""What reads files and directories while some of them are kept from the world: in place of the functions of `os`."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any

from keepstep.training.scratch_entries import ScratchEntries, ScratchEntry
from keepstep.training.scratch_layers import REAL, directory_at, fault
from keepstep.training.scratch_redirect import ACTIVE, Redirect, below, like

__all__ = ["folder_changer", "folder_teller", "lister", "reader", "scanner"]

_Named = Callable[..., Any]


def reader(original: _Named) -> _Named:
    """In place of what looks at one path."""
    follows = original.__name__ not in ("lstat", "readlink")
    asks = original.__name__ == "access"

    @functools.wraps(original)
    def read(path: Any = None, *rest: Any, dir_fd: int | None = None, **words: Any) -> Any:
        redirect, full = ACTIVE.seen(path, folder=dir_fd, follow=words.get("follow_symlinks", follows))
        if redirect is None:
            return original(path, *rest, **below(dir_fd), **words)
        if asks and redirect.layers.physical(full) is None:
            return False
        return original(redirect.source(full, path), *rest, **words)

    return read


def lister(original: _Named) -> _Named:
    """In place of `os.listdir`."""

    @functools.wraps(original)
    def listed(path: Any = None) -> Any:
        redirect, full = _directory(path)
        if redirect is None or (isinstance(path, int) and not redirect.layers.mixed(full)):
            return original(path)
        place = redirect.layers.source(full, path)
        if not redirect.layers.mixed(full) or not directory_at(place):
            return original(like(path, place))
        return [like(path, name) for name in redirect.layers.names(full)]

    return listed


def scanner(original: _Named) -> _Named:
    """In place of `os.scandir`."""

    @functools.wraps(original)
    def scanned(path: Any = None) -> Any:
        redirect, full = _directory(path)
        if redirect is None or (not redirect.layers.mixed(full) and _same(path, full)):
            return original(path)
        given = "." if path is None else path
        place = redirect.layers.source(full, given)
        if not directory_at(place):
            raise fault(errno.ENOTDIR, given)
        start = "" if isinstance(given, int) else os.fspath(given)
        return ScratchEntries(
            ScratchEntry(redirect, f"{full.rstrip('/')}/{name}", shown=os.path.join(start, like(start, name)))
            for name in redirect.layers.names(full)
        )

    return scanned


def folder_changer(original: _Named) -> _Named:
    """In place of `os.chdir`. A directory of the world is entered there, where native code finds its files, too."""

    @functools.wraps(original)
    def changed(path: Any) -> None:
        redirect, full = ACTIVE.seen(path)
        if redirect is None:
            original(path)
            return
        place = redirect.layers.source(full, path)
        original(full if redirect.layers.lower(full) == full and directory_at(full) else place)

    return changed


def folder_teller(original: _Named) -> _Named:
    """In place of `os.getcwd`."""

    @functools.wraps(original)
    def told() -> Any:
        place = original()
        redirect = ACTIVE.redirect
        return place if redirect is None else like(place, redirect.paths.outside(os.fsdecode(place)))

    return told


def _directory(path: Any) -> tuple[Redirect | None, str]:
    """As `Active.seen` for a path, an open directory, or None, the current one."""
    redirect = ACTIVE.redirect
    if redirect is not None and isinstance(path, int):
        path = redirect.paths.folder(path)
    return ACTIVE.seen("." if path is None else path)


def _same(path: Any, full: str) -> bool:
    """Whether the system finds `full` under `path` by itself."""
    if isinstance(path, int):
        return True
    try:
        return os.path.samestat(REAL.stat("." if path is None else path), REAL.stat(full))
    except OSError:
        return False
