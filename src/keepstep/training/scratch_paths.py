"""What a path means to a script whose files lie in two layers: symbolic links of both are followed, one by one."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from typing import Any

from keepstep.training.scratch_layers import REAL, Layers, fault

__all__ = ["ScratchPaths"]

_THROUGH = ("/dev/", "/proc/", "/sys/")
_SHARED_MEMORY = "/dev/shm/"
_MOST_LINKS = 40


class ScratchPaths:
    """`free` says of an absolute path that it is the process's own to write (caches)."""

    def __init__(self, layers: Layers, free: Callable[[str], bool]) -> None:
        self._layers = layers
        self._free = free

    def find(self, path: Any, *, folder: int | None = None, follow: bool = True) -> str:
        """The full path, without symbolic links, that `path` (below the open directory `folder`) means.

        Empty where it may stay as it is: descriptors, devices, what is free. The last link is kept unless `follow`.
        Raises OSError where links never end.
        """
        given = "" if path is None or isinstance(path, int) else os.fsdecode(path)
        if not given:
            return ""
        if not given.startswith("/"):
            given = f"{self.folder(folder)}/{given}"
        plain = "/" + os.path.normpath(given).lstrip("/")
        if self.outside(plain) == plain and self._passes(plain):
            return ""
        found = self._resolved(given, follow=follow)
        return "" if not found or self._passes(found) else found

    def folder(self, descriptor: int | None = None) -> str:
        """The full path of the directory open as `descriptor`, or of the current one."""
        place = REAL.getcwd() if descriptor is None else REAL.readlink(f"/proc/self/fd/{descriptor}")
        return self.outside(place)

    def outside(self, place: str) -> str:
        """The path that a place on the disk has for the script."""
        if f"{place}/".startswith(self._layers.root + "/"):
            return place[len(self._layers.root) :] or "/"
        return place

    def _passes(self, path: str) -> bool:
        return _through(path) or self._free(path)

    def _resolved(self, given: str, *, follow: bool) -> str:
        done, links = "", 0
        rest = deque(given.split("/"))
        while rest:
            name = rest.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                done = done.rpartition("/")[0]
                continue
            here = f"{done}/{name}"
            if _through(here):
                return ""
            if here == self._layers.root:
                done = ""
                continue
            link = self._link(here) if follow or rest else ""
            if not link:
                done = here
                continue
            links += 1
            if links > _MOST_LINKS:
                raise fault(errno.ELOOP, given)
            rest.extendleft(reversed(link.split("/")))
            done = "" if link.startswith("/") else done
        return done or "/"

    def _link(self, path: str) -> str:
        """Where the symbolic link at `path` leads; empty where there is none."""
        place = self._layers.physical(path)
        try:
            if place is not None and stat.S_ISLNK(REAL.lstat(place).st_mode):
                return str(REAL.readlink(place))
        except OSError:
            pass
        return ""


def _through(path: str) -> bool:
    """Devices and the kernel's own files. Shared memory that is used by file name is none of them."""
    return path.startswith(_THROUGH) and not f"{path}/".startswith(_SHARED_MEMORY)
