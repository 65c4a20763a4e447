"""Where calls that touch files lead while a trial or a rehearsal keeps them from the world; else into the world."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from keepstep.training.scratch_layers import Layers
from keepstep.training.scratch_paths import ScratchPaths

__all__ = ["ACTIVE", "Active", "Redirect", "below", "like"]


class Redirect:
    """`told` gets "write" or "remove" and a path, when something is kept from the world."""

    def __init__(self, layers: Layers, paths: ScratchPaths, *, told: Callable[[str, str], None]) -> None:
        self.layers, self.paths, self._told = layers, paths, told

    def tell(self, what: str, given: Any) -> None:
        """Something of the world stays as it is."""
        self._told(what, os.fsdecode(given))

    def writable(self, full: str, given: Any, *, fresh: bool = False) -> Any:
        """As of the layers, as text or bytes like `given`; told."""
        self.tell("write", given)
        return like(given, self.layers.writable(full, given, fresh=fresh))

    def source(self, full: str, given: Any) -> Any:
        """As of the layers, as text or bytes like `given`."""
        return like(given, self.layers.source(full, given))


class Active:
    """The redirect of this process; None: there is none. Calls ask here each time: modules keep them."""

    redirect: Redirect | None = None

    def find(self, path: Any, *, folder: int | None = None, follow: bool = True) -> tuple[Redirect | None, str]:
        """The redirect and the full path; None and nothing where the call shall do what it always does."""
        redirect = self.redirect
        if redirect is None:
            return None, ""
        full = redirect.paths.find(path, folder=folder, follow=follow)
        return (redirect, full) if full else (None, "")

    def seen(self, path: Any, *, folder: int | None = None, follow: bool = True) -> tuple[Redirect | None, str]:
        """As `find`, for calls that only read: they do what they always do as long as nothing was changed."""
        redirect = self.redirect
        if redirect is None or not redirect.layers.touched:
            return None, ""
        return self.find(path, folder=folder, follow=follow)


ACTIVE = Active()
"""That of this process."""


def below(folder: int | None) -> dict[str, Any]:
    """The words that name an open directory, if there is one."""
    return {} if folder is None else {"dir_fd": folder}


def like(given: Any, place: str) -> Any:
    """`place` as bytes where `given` is."""
    return os.fsencode(place) if isinstance(given, bytes) else place
