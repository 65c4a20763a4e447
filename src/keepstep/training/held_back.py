"""What a rehearsal must not leave in the world: files it writes go to a scratch directory, what it prints nowhere.

A script that talks to the world in other ways can ask `job.rehearsing`.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import io
import multiprocessing.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

from keepstep.training.scratch_directory import scratch_directory
from keepstep.training.scratch_files import ScratchFiles, remove_scratch

__all__ = ["HeldBack", "own_streams", "silence"]

_lent: list[io.TextIOWrapper] = []  # what a library has wrapped would be closed with its end
_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


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
        for stream in (sys.stdout, sys.stderr, *(stream for stream, _ in streams)):
            _flush(stream)
        for (_, descriptor), copy in zip(streams, kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Other objects as `sys.stdout` and `sys.stderr`: what is done to them (wrapped, replaced, closed) does not last.

    They write to the same descriptors, so a library that keeps one of them goes on being heard.
    """
    kept = sys.stdout, sys.stderr
    own = [_stream(descriptor, kept[descriptor - 1]) for descriptor in (1, 2)]
    _lent.extend(own)
    sys.stdout, sys.stderr = own
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        sys.stdout, sys.stderr = kept


def _stream(descriptor: int, other: Any) -> io.TextIOWrapper:
    """One that writes to `descriptor`, as `other` does."""
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115 it lives as long as somebody has the stream
    encoding, errors = getattr(other, "encoding", None), getattr(other, "errors", None)
    return io.TextIOWrapper(raw, encoding=encoding, errors=errors, line_buffering=True)


def _flush(stream: Any) -> None:
    """Also where a script has closed it, or has put something else in its place."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()


class HeldBack:
    """A context manager: inside it this process writes to a scratch directory, which is gone afterwards."""

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._directory = ""

    def __enter__(self) -> HeldBack:
        cache = _inductor_cache()
        self._directory = self._ends.enter_context(scratch_directory())
        self._ends.callback(_set_variable, _INDUCTOR, os.environ.get(_INDUCTOR))
        os.environ[_INDUCTOR] = cache
        files = ScratchFiles(Path(self._directory), free=_Caches())
        files.enter()
        self._ends.callback(files.leave)
        self._ends.enter_context(_sockets())
        self._ends.callback(setattr, atexit, "register", atexit.register)
        atexit.register = _registered(atexit.register)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def discard(self) -> None:
        """Remove what was written, in a process that ends with it: files stay kept from the world."""
        remove_scratch(self._directory)


@contextlib.contextmanager
def _sockets() -> Iterator[None]:
    """The directory that multiprocessing makes for its sockets, once in a process, is not that of the rehearsal."""
    known: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = known.get("tempdir")
    try:
        yield
    finally:
        made = known.get("tempdir")
        if made != before:
            resource_sharer.stop()
            for end in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
                if end._args and made in end._args:
                    end()
            known["tempdir"] = before


class _Caches:
    """Says of a path whether it is what compilers keep: the same for all ranks, so it shall stay.

    Temporary files are none of it: they lie in the scratch directory. Made before any file is kept from the world.
    """

    def __init__(self) -> None:
        known = [str(Path.home() / ".triton"), *_named()]
        self._places = tuple({f"{form(one)}/" for one in known for form in (os.path.abspath, os.path.realpath)})

    def __call__(self, path: str) -> bool:
        inside = f"{path}/"
        return inside.startswith((*self._places, *(f"{one.rstrip('/')}/" for one in _named())))


def _named() -> list[str]:
    """The directories that the environment names now."""
    return [place for name in (_INDUCTOR, _TRITON) if (place := os.environ.get(name))]


def _inductor_cache() -> str:
    """Where torch's compiler keeps what it has compiled, as in torch/_inductor/runtime/cache_dir_utils.py."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.environ.get(_INDUCTOR) or os.path.join(tempfile.gettempdir(), name)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _registered(original: Callable[..., Any]) -> Callable[..., Any]:
    """`atexit.register` that forgets what the script itself wants done; libraries get what they ask for."""

    def register(function: Any, *rest: Any, **words: Any) -> Any:
        if getattr(function, "__module__", None) == "__main__":
            return function
        return original(function, *rest, **words)

    return register
