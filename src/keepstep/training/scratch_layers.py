"""Two layers of files, as of an overlay: the lower one is the world, which is only read, the upper one a directory.

The upper layer holds each file that was written under its full path. What was removed is hidden in the lower layer;
what was renamed there appears under its new name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from types import SimpleNamespace
from typing import Any

__all__ = ["REAL", "Layers", "directory_at", "fault", "there"]

REAL = SimpleNamespace(
    open=io.open,
    **{
        name: getattr(os, name)
        for name in (
            "chmod",
            "getcwd",
            "link",
            "listdir",
            "lstat",
            "mkdir",
            "readlink",
            "rename",
            "rmdir",
            "scandir",
            "stat",
            "statvfs",
            "symlink",
            "unlink",
        )
    },
)
"""The calls as they are outside of trials and rehearsals."""

_COPIED_BYTES = 1 << 20
_NONE: dict[str, str | None] = {}


def fault(number: int, *given: Any) -> OSError:
    """The error that the system gives with this number, about the paths as they were `given`."""
    first, second = (*(os.fspath(one) if isinstance(one, os.PathLike) else one for one in given), None)[:2]
    return OSError(number, os.strerror(number), first, None, second)


def there(place: str) -> bool:
    """Whether something is at this place of the disk."""
    try:
        REAL.lstat(place)
    except (OSError, ValueError):
        return False
    return True


def directory_at(place: str) -> bool:
    """Whether a directory, and no link to one, is at this place of the disk."""
    try:
        return stat.S_ISDIR(REAL.lstat(place).st_mode)
    except (OSError, ValueError):
        return False


class Layers:
    """`root` is the directory of the upper layer. Paths are full and without symbolic links.

    `touched` is false as long as both layers together are the world as it is.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.touched = False
        self._moved: dict[str, dict[str, str | None]] = {}
        """By directory and name: where the part of the lower layer lies instead; None: it is hidden."""

    # ------------------------------------------------------------------ reading

    def upper(self, path: str) -> str:
        """The place of `path` in the upper layer."""
        return self.root + path

    def lower(self, path: str) -> str | None:
        """The place of `path` in the world, None where that is hidden."""
        at, rest = path, ""
        while self._moved and at:
            above, _, name = at.rpartition("/")
            place = self._moved.get(above, _NONE).get(name, "")
            if place != "":
                return None if place is None else place + rest
            at, rest = above, f"/{name}{rest}"
        return path

    def physical(self, path: str) -> str | None:
        """Where on the disk lies what is at `path`; None where nothing is."""
        upper = self.upper(path)
        if there(upper):
            return upper
        lower = self.lower(path)
        if lower is None or not there(lower):
            return None
        if lower != path and directory_at(lower):  # renamed: whoever opens it finds its name by the upper layer
            self._add(path)
            return upper
        return lower

    def source(self, path: str, given: Any) -> str:
        """Where to read `path`, which was `given` so. Raises FileNotFoundError where it is hidden."""
        place = self.physical(path) or self.lower(path)
        if place is None:
            raise fault(errno.ENOENT, given)
        return place

    def mixed(self, path: str) -> bool:
        """Whether the directory at `path` differs from the one in the world."""
        return bool(self._moved.get(path.rstrip("/"))) or self.lower(path) != path or there(self.upper(path))

    def names(self, path: str) -> list[str]:
        """What is in the directory at `path`."""
        upper, lower = self.upper(path), self.lower(path)
        moved = dict(self._moved.get(path.rstrip("/"), _NONE))
        found = dict.fromkeys(REAL.listdir(upper) if directory_at(upper) else ())
        if lower is not None and directory_at(lower):
            found.update(dict.fromkeys(name for name in REAL.listdir(lower) if moved.get(name, name) is not None))
        found.update(dict.fromkeys(name for name, place in moved.items() if place is not None))
        return list(found)

    # ------------------------------------------------------------------ writing

    def writable(self, path: str, given: Any, *, fresh: bool = False) -> str:
        """Where to write `path`: its present contents are there, unless it is `fresh`. Raises OSError."""
        upper = self.upper(path)
        if not there(upper):
            lower = self.lower(path)
            self.enter_parent(path, given)
            if lower is not None and there(lower):
                self._copy_up(lower, upper, given=given, fresh=fresh)
        return upper

    def enter_parent(self, path: str, given: Any) -> None:
        """The directory above `path` is in the upper layer, too. Raises OSError where there is none."""
        self.touched = True
        above = os.path.dirname(path)
        place = self.physical(above)
        if place is None or not directory_at(place):
            raise fault(errno.ENOENT if place is None else errno.ENOTDIR, given)
        self._add(above)

    def hide(self, path: str) -> None:
        """The world's `path`, and all inside of it, is not there any more."""
        self.show(path, None)

    def show(self, path: str, place: str | None) -> None:
        """What the world has at `place` is the lower layer of `path`."""
        self.touched = True
        for folder in self._folders(path):
            self._moved.pop(folder, None)
        above, _, name = path.rpartition("/")
        self._moved.setdefault(above, {})[name] = place

    def moves_inside(self, path: str) -> dict[str, str | None]:
        """By the rest of their paths: what was hidden or renamed inside of `path`."""
        inside = ((folder, dict(self._moved.get(folder, _NONE))) for folder in self._folders(path))
        return {f"{folder}/{name}".removeprefix(path): place for folder, some in inside for name, place in some.items()}

    def _folders(self, path: str) -> list[str]:
        """`path` and directories in it, where something was hidden or renamed in them."""
        return [one for one in tuple(self._moved) if f"{one}/".startswith(f"{path}/")]

    def _add(self, path: str) -> None:
        """The directory `path` of the lower layer gets its twin in the upper one."""
        upper = self.upper(path)
        if path in ("", "/") or there(upper):
            return
        self._add(os.path.dirname(path))
        mode = stat.S_IMODE(REAL.stat(self.lower(path)).st_mode)
        with contextlib.suppress(FileExistsError):  # another thread was faster
            REAL.mkdir(upper, mode | stat.S_IRWXU)
        self.touched = True

    def _copy_up(self, lower: str, upper: str, *, given: Any, fresh: bool) -> None:
        """Anything but an ordinary file begins empty."""
        about = REAL.stat(lower)
        if stat.S_ISDIR(about.st_mode):
            raise fault(errno.EISDIR, given)
        wanted = 0 if fresh or not stat.S_ISREG(about.st_mode) else about.st_size
        room = REAL.statvfs(self.root)
        if wanted > room.f_bavail * room.f_frsize // 2:
            raise fault(errno.ENOSPC, given)
        try:
            with REAL.open(upper, "wb") as target:
                if wanted:
                    with REAL.open(lower, "rb") as source:
                        shutil.copyfileobj(source, target, _COPIED_BYTES)
            REAL.chmod(upper, stat.S_IMODE(about.st_mode))
        except OSError:
            with contextlib.suppress(OSError):
                REAL.unlink(upper)
            raise
