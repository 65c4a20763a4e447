"""Files that a script writes in a trial or a rehearsal land in a scratch directory; what it removes or changes stays.

Python's own ways to write are covered (`open`, `os`, `pathlib`, `shutil`) and `torch.save`, under every name by which a
module has got hold of them; native code that opens files by itself, child processes and the network are not. The script
sees the world's files with its own changes: what it wrote, renamed, removed. Temporary files lie in the directory, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from keepstep.training import scratch_changes, scratch_opens, scratch_reads
from keepstep.training.scratch_layers import REAL, Layers
from keepstep.training.scratch_paths import ScratchPaths
from keepstep.training.scratch_redirect import ACTIVE, Redirect

__all__ = ["ScratchFiles", "remove_scratch"]

_Named = Callable[..., Any]
_OS_CALLS: tuple[tuple[str, Callable[[_Named], _Named]], ...] = (
    ("open", scratch_opens.os_opener),
    ("stat lstat readlink access statvfs listxattr getxattr", scratch_reads.reader),
    ("listdir", scratch_reads.lister),
    ("scandir", scratch_reads.scanner),
    ("chdir", scratch_reads.folder_changer),
    ("getcwd getcwdb", scratch_reads.folder_teller),
    ("mkdir mkfifo mknod", scratch_changes.maker),
    ("symlink", scratch_changes.symlinker),
    ("truncate", scratch_changes.cutter),
    ("remove unlink rmdir", scratch_changes.remover),
    ("chmod chown lchown utime setxattr removexattr", scratch_changes.changer),
    ("rename replace", scratch_changes.mover),
    ("link", scratch_changes.linker),
)
_ABILITIES = (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks)
_OWN = "keepstep.training.scratch_"


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
        own = os.path.realpath(directory)
        self._files, self._temporary = f"{own}/files", f"{own}/tmp"
        layers = Layers(self._files)
        paths = ScratchPaths(layers, lambda path: f"{path}/".startswith(f"{own}/") or free(path))
        self._redirect = Redirect(layers, paths, told=told)
        self._temporary_before: tuple[str | None, str | None] = (None, None)
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def enter(self) -> None:
        """From now on."""
        for place in (self._files, self._temporary):
            os.makedirs(place, exist_ok=True)
        self._temporary_before = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = self._temporary
        pairs = list(_pairs())
        self._replace({id(original): (original, other) for original, other in pairs})
        for ability in _ABILITIES:
            ability.update(other for original, other in pairs if original in ability)
        ACTIVE.redirect = self._redirect

    def leave(self) -> None:
        """All as it was; the directory stays. Whoever has kept a call that stood in reaches the world by it."""
        ACTIVE.redirect = None
        for names, name, original, other in self._replaced:
            if names.get(name) is other:
                names[name] = original
        for ability in _ABILITIES:
            ability.difference_update([other for *_, other in self._replaced])
        self._replaced.clear()
        tempfile.tempdir, variable = self._temporary_before
        os.environ.pop("TMPDIR", None)
        if variable is not None:
            os.environ["TMPDIR"] = variable

    def _replace(self, others: dict[int, tuple[Any, Any]]) -> None:
        """Put what stands in into every module that is loaded."""
        for module, loaded in list(sys.modules.items()):
            names = getattr(loaded, "__dict__", None)
            if not isinstance(names, dict) or module in ("posix", "_io") or module.startswith(_OWN):
                continue
            for name, value in list(names.items()):
                if id(value) in others:
                    original, other = others[id(value)]
                    names[name] = other
                    self._replaced.append((names, name, original, other))


def remove_scratch(directory: str) -> None:
    """Remove a scratch directory that may be in use; what is written by its paths from then on fails."""
    ended = f"{directory}.ended"
    with contextlib.suppress(OSError):
        REAL.rename(directory, ended)
        _remove(ended)


def _remove(directory: str) -> None:
    """As far as that is possible."""
    with contextlib.suppress(OSError):
        for entry in REAL.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
            else:
                REAL.unlink(entry.path)
        REAL.rmdir(directory)


def _pairs() -> Iterator[tuple[_Named, _Named]]:
    """Each original with what stands in for it."""
    yield io.open, scratch_opens.opener(io.open)
    yield torch._C.PyTorchFileWriter, scratch_opens.saver(torch._C.PyTorchFileWriter)
    for names, maker in _OS_CALLS:
        for name in names.split():
            original = getattr(os, name)
            other = maker(original)
            with contextlib.suppress(AttributeError):
                other.__module__ = "os"  # by which it is found again where it is pickled
            yield original, other
