"""What opens files while they are kept from the world: in place of `open`, `os.open` and torch's writer."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any

from keepstep.training.scratch_layers import fault
from keepstep.training.scratch_redirect import ACTIVE, below

__all__ = ["opener", "os_opener", "saver"]

_WRITES = set("wax+")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_Named = Callable[..., Any]


def _routed(file: Any, mode: str) -> Any:
    """What to open instead of `file`. Raises OSError where that can be told beforehand."""
    if not _WRITES & set(mode):
        redirect, full = ACTIVE.seen(file)
        return file if redirect is None else redirect.source(full, file)
    redirect, full = ACTIVE.find(file)
    if redirect is None:
        return file
    place = redirect.layers.physical(full)
    if "x" in mode and place is not None:
        raise fault(errno.EEXIST, file)
    if "r" in mode and place is None:
        raise fault(errno.ENOENT, file)
    return redirect.writable(full, file, fresh="w" in mode)


def opener(original: _Named) -> _Named:
    """In place of `open`. A caller's own opener gets the path as it is."""

    @functools.wraps(original)
    def opened(file: Any, mode: str = "r", *rest: Any, **words: Any) -> Any:
        by_hand = words.get("opener") or any(rest[5:])
        return original(file if by_hand or not isinstance(mode, str) else _routed(file, mode), mode, *rest, **words)

    return opened


def saver(original: _Named) -> _Named:
    """In place of the writer behind `torch.save`, whose target is a path or something open."""

    @functools.wraps(original, updated=())
    def saved(file: Any, *rest: Any, **words: Any) -> Any:
        redirect, full = ACTIVE.find(file) if isinstance(file, (str, os.PathLike)) else (None, "")
        return original(file if redirect is None else redirect.writable(full, file, fresh=True), *rest, **words)

    return saved


def os_opener(original: _Named) -> _Named:
    """In place of `os.open`."""

    @functools.wraps(original)
    def opened(path: Any, flags: int, *mode: Any, dir_fd: int | None = None, **words: Any) -> Any:
        alone = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        redirect, full = ACTIVE.find(path, folder=dir_fd, follow=not (alone or flags & os.O_NOFOLLOW))
        if redirect is None:
            return original(path, flags, *mode, **below(dir_fd), **words)
        unnamed = _UNNAMED and flags & _UNNAMED == _UNNAMED
        if unnamed or not flags & _WRITING:
            return original(redirect.source(full, path), flags, *mode, **words)
        place = redirect.layers.physical(full)
        if alone and place is not None:
            raise fault(errno.EEXIST, path)
        if place is None and not flags & os.O_CREAT:
            raise fault(errno.ENOENT, path)
        place = redirect.writable(full, path, fresh=bool(flags & os.O_TRUNC))
        return original(place, flags, *mode, **words)

    return opened
