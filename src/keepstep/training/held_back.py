"""What a rehearsal must not leave in the world: files it writes go to a scratch directory, what it prints nowhere.

Held back is what goes through Python (`open`, `os`, `pathlib`, `shutil`) and `torch.save`. Native code that opens
files by itself, child processes and the network are not: a script can ask `job.rehearsing`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["HeldBack", "silence"]

_WRITES = set("wax+")
_THROUGH = ("/dev/", "/proc/", "/sys/")
_MOST_COPIED_BYTES = 256 * 1024 * 1024
_REMOVALS = ("remove", "unlink", "rmdir")
_TOUCHES = ("chmod", "chown", "utime", "truncate")
_MOVES = ("rename", "replace", "link", "symlink")


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
        self._scratch = ""
        self._originals: list[tuple[Any, str, Any]] = []
        self._open: Callable[..., Any] = io.open
        self._stat: Callable[..., Any] = os.stat

    def __enter__(self) -> HeldBack:
        self._scratch = tempfile.mkdtemp(prefix="keepstep-rehearsal-")
        self._open, self._stat = io.open, os.stat
        self._replace(builtins, "open", value=self._opened)
        self._replace(io, "open", value=self._opened)
        self._replace(os, "open", value=self._os_opened(os.open))
        self._replace(os, "mkdir", value=self._made(os.mkdir))
        self._replace(os, "stat", value=self._seen(os.stat))
        self._replace(os, "listdir", value=self._seen(os.listdir))
        self._replace(os, "scandir", value=self._seen(os.scandir))
        for name in _REMOVALS:
            self._replace(os, name, value=self._removed(getattr(os, name)))
        for name in _TOUCHES:
            self._replace(os, name, value=self._touched(getattr(os, name)))
        for name in _MOVES:
            self._replace(os, name, value=self._moved(getattr(os, name)))
        self._replace(torch._C, "PyTorchFileWriter", value=self._torch_writer(torch._C.PyTorchFileWriter))
        self._replace(atexit, "register", value=_registered(atexit.register))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)
        self._originals.clear()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _replace(self, owner: Any, name: str, *, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    # ------------------------------------------------------------------ paths

    def _held(self, path: Any) -> str:
        """Where writes to `path` go; empty for what is no file of the script's (descriptors, devices, caches)."""
        if isinstance(path, int) or path is None:
            return ""
        full = os.path.abspath(os.fsdecode(path))
        if full.startswith((*_THROUGH, self._scratch)) or _is_cache(full):
            return ""
        return self._scratch + full

    def _exists(self, path: str) -> bool:
        try:
            self._stat(path)
        except OSError:
            return False
        return True

    def _prepared(self, path: Any, *, fresh: bool) -> str:
        """The place for a write, its directory made, with the file's present contents unless it is `fresh`."""
        held = self._held(path)
        if not held:
            return ""
        self._make_parents(held)
        with contextlib.suppress(OSError):
            if not fresh and not self._exists(held) and self._stat(path).st_size <= _MOST_COPIED_BYTES:
                with self._open(path, "rb") as source, self._open(held, "wb") as target:
                    shutil.copyfileobj(source, target)
        return held

    def _make_parents(self, held: str) -> None:
        make = next(value for owner, name, value in self._originals if owner is os and name == "mkdir")
        missing = [place for place in Path(held).parents if not self._exists(str(place))]
        for place in reversed(missing):
            make(str(place))

    # ------------------------------------------------------------------ what is called instead

    def _opened(self, file: Any, mode: str = "r", *rest: Any, **words: Any) -> Any:
        writes = bool(_WRITES & set(mode))
        held = self._prepared(file, fresh=mode[:1] in "wx") if writes else self._held(file)
        if held and mode[:1] == "x" and self._exists(os.fspath(file)):
            raise FileExistsError(17, os.strerror(17), file)
        return self._open(held if held and (writes or self._exists(held)) else file, mode, *rest, **words)

    def _os_opened(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *rest: Any, **words: Any) -> int:
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            if words.get("dir_fd") is not None:
                return original(path, flags, *rest, **words)
            held = self._prepared(path, fresh=bool(flags & os.O_TRUNC)) if writes else self._held(path)
            return original(held if held and (writes or self._exists(held)) else path, flags, *rest, **words)

        return opened

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        def made(path: Any, *rest: Any, **words: Any) -> None:
            held = self._held(path)
            if held and self._exists(os.fspath(path)):
                raise FileExistsError(17, os.strerror(17), path)
            if held:
                self._make_parents(held)
            original(held or path, *rest, **words)

        return made

    def _seen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seen(path: Any = ".", *rest: Any, **words: Any) -> Any:
            held = "" if words.get("dir_fd") is not None else self._held(path)
            return original(held if held and self._exists(held) else path, *rest, **words)

        return seen

    def _removed(self, original: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, *rest: Any, **words: Any) -> None:
            folder = words.get("dir_fd")
            full = path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
            held = self._held(full)
            if not held:
                original(path, *rest, **words)
            elif self._exists(held):
                original(held)
            else:
                self._stat(full)  # what is not there cannot be removed; what is there stays

        return removed

    def _touched(self, original: Callable[..., None]) -> Callable[..., None]:
        def touched(path: Any, *rest: Any, **words: Any) -> None:
            held = self._prepared(path, fresh=False)
            original(held or path, *rest, **words)

        return touched

    def _moved(self, original: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, *rest: Any, **words: Any) -> None:
            held = self._prepared(target, fresh=True)
            if not held:
                original(source, target, *rest, **words)
            else:
                original(self._prepared(source, fresh=False) or source, held, *rest, **words)

        return moved

    def _torch_writer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def writer(file: Any, *rest: Any, **words: Any) -> Any:
            if isinstance(file, (str, os.PathLike)):
                file = self._prepared(file, fresh=True) or file
            return original(file, *rest, **words)

        return writer


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
