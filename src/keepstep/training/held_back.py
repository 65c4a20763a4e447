"""What a rehearsal must not leave in the world: files it writes go to a scratch directory, what it prints nowhere.

A script that talks to the world in other ways can ask `job.rehearsing`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keepstep.training.scratch_files import ScratchFiles

__all__ = ["HeldBack", "silence"]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what this process prints, on both streams."""
    streams = ((sys.stdout, 1), (sys.stderr, 2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = [os.dup(descriptor) for _, descriptor in streams]
    try:
        for stream, descriptor in streams:
            stream.flush()
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for (stream, descriptor), copy in zip(streams, kept, strict=True):
            stream.flush()
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)


class HeldBack:
    """A context manager: inside it this process writes to a scratch directory, which is gone afterwards."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> HeldBack:
        directory = tempfile.mkdtemp(prefix="keepstep-rehearsal-")
        self._ends.callback(shutil.rmtree, directory, ignore_errors=True)
        files = ScratchFiles(Path(directory), free=_is_cache)
        files.enter()
        self._ends.callback(files.leave)
        self._ends.callback(setattr, atexit, "register", atexit.register)
        atexit.register = _registered(atexit.register)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


def _registered(original: Callable[..., Any]) -> Callable[..., Any]:
    """`atexit.register` that forgets what the script itself wants done; libraries get what they ask for."""

    def register(function: Any, *rest: Any, **words: Any) -> Any:
        if getattr(function, "__module__", None) == "__main__":
            return function
        return original(function, *rest, **words)

    return register


def _is_cache(full: str) -> bool:
    """True for what compilers keep or put down for a moment: it is the same for all ranks and shall stay."""
    here = Path(full)
    temporary = tempfile.gettempdir()
    caches = [os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), os.environ.get("TRITON_CACHE_DIR", "")]
    caches += [str(Path.home() / ".cache"), str(Path.home() / ".triton")]
    if any(place and full.startswith(place.rstrip("/") + "/") for place in caches):
        return True
    try:
        first = here.relative_to(temporary).parts[0]
    except (ValueError, IndexError):
        return False
    return first.startswith(("torchinductor_", "tmp", "torch_", "pymp-"))
