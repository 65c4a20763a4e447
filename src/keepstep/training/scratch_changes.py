"""What makes, changes and removes files while they are kept from the world: in place of the functions of `os`."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any

from keepstep.training.scratch_layers import REAL, directory_at, fault, there
from keepstep.training.scratch_moves import linked, received, removed, renamed
from keepstep.training.scratch_redirect import ACTIVE, Redirect, below, like

__all__ = ["changer", "cutter", "linker", "maker", "mover", "remover", "symlinker"]

_Named = Callable[..., Any]


def maker(original: _Named) -> _Named:
    """In place of what makes a directory, a pipe or a node."""

    @functools.wraps(original)
    def made(path: Any, *rest: Any, dir_fd: int | None = None, **words: Any) -> Any:
        redirect, full = ACTIVE.find(path, folder=dir_fd, follow=False)
        if redirect is None:
            return original(path, *rest, **below(dir_fd), **words)
        return original(_new(redirect, full, path), *rest, **words)

    return made


def symlinker(original: _Named) -> _Named:
    """In place of `os.symlink`."""

    @functools.wraps(original)
    def symlink(src: Any, dst: Any, *rest: Any, dir_fd: int | None = None, **words: Any) -> None:
        redirect, full = ACTIVE.find(dst, folder=dir_fd, follow=False)
        if redirect is None:
            original(src, dst, *rest, **below(dir_fd), **words)
            return
        original(src, _new(redirect, full, src, dst))
        redirect.tell("write", dst)

    return symlink


def cutter(original: _Named) -> _Named:
    """In place of `os.truncate`."""

    @functools.wraps(original)
    def cut(path: Any, length: int) -> Any:
        redirect, full = ACTIVE.find(path)
        if redirect is None:
            return original(path, length)
        if redirect.layers.physical(full) is None:
            raise fault(errno.ENOENT, path)
        return original(redirect.writable(full, path), length)

    return cut


def remover(original: _Named) -> _Named:
    """In place of what removes one file or one empty directory."""
    directory = original.__name__ == "rmdir"

    @functools.wraps(original)
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        redirect, full = ACTIVE.find(path, folder=dir_fd, follow=False)
        if redirect is None:
            original(path, **below(dir_fd))
        elif removed(redirect.layers, full, given=path, directory=directory):
            redirect.tell("remove", full)

    return remove


def changer(original: _Named) -> _Named:
    """In place of what changes rights, owner or times: those of the world's files stay as they are."""
    follows = not original.__name__.startswith("l")

    @functools.wraps(original)
    def changed(path: Any, *rest: Any, dir_fd: int | None = None, **words: Any) -> Any:
        redirect, full = ACTIVE.find(path, folder=dir_fd, follow=words.get("follow_symlinks", follows))
        if redirect is None:
            return original(path, *rest, **below(dir_fd), **words)
        place = redirect.layers.physical(full)
        if place is None:
            raise fault(errno.ENOENT, path)
        if place == redirect.layers.upper(full):
            return original(place, *rest, **words)
        return redirect.tell("write", path)

    return changed


def mover(original: _Named) -> _Named:
    """In place of `os.rename` and `os.replace`."""

    @functools.wraps(original)
    def moved(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        redirect, source = ACTIVE.find(src, folder=src_dir_fd, follow=False)
        other, target = ACTIVE.find(dst, folder=dst_dir_fd, follow=False)
        if redirect is None and other is None:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        elif redirect is None:
            assert other is not None
            place = _placed(src, src_dir_fd)
            original(place, _from_outside(other, place, target=target, given=(src, dst)))
            other.tell("write", dst)
        elif other is None:
            upper = redirect.layers.upper(source)
            if not there(upper) or directory_at(upper):
                raise fault(errno.EXDEV, src, dst)  # as between two disks: it has to be copied
            original(upper, _placed(dst, dst_dir_fd))
            redirect.layers.hide(source)
        else:
            kept = renamed(redirect.layers, source, target=target, given=(src, dst))
            redirect.tell("write", dst)
            if kept:
                redirect.tell("remove", src)

    return moved


def linker(original: _Named) -> _Named:
    """In place of `os.link`."""

    @functools.wraps(original)
    def link(src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None, **words: Any) -> None:
        redirect, source = ACTIVE.find(src, folder=src_dir_fd, follow=False)
        other, target = ACTIVE.find(dst, folder=dst_dir_fd, follow=False)
        if redirect is None and other is None:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **words)
            return
        if redirect is None or other is None:
            raise fault(errno.EXDEV, src, dst)
        linked(redirect.layers, source, target=target, given=(src, dst))
        redirect.tell("write", dst)

    return link


def _new(redirect: Redirect, full: str, *given: Any) -> Any:
    """The place for something new at the path that was `given` last. Raises OSError."""
    if redirect.layers.physical(full) is not None:
        raise fault(errno.EEXIST, *given)
    redirect.layers.enter_parent(full, given[-1])
    return like(given[-1], redirect.layers.upper(full))


def _from_outside(redirect: Redirect, place: Any, *, target: str, given: tuple[Any, Any]) -> Any:
    """Where what lies at `place` goes, if it can go there in one move. Raises OSError."""
    source = os.fsdecode(place)
    if not there(source):
        raise fault(errno.ENOENT, *given)
    if REAL.lstat(source).st_dev != REAL.stat(redirect.layers.root).st_dev:
        raise fault(errno.EXDEV, *given)
    return received(redirect.layers, target, given=given, directory=directory_at(source))


def _placed(path: Any, folder: int | None) -> Any:
    """`path` below an open directory, as the system finds it."""
    return path if folder is None else os.path.join(f"/proc/self/fd/{folder}", os.fsdecode(path))
