"""A scratch directory of one process, which holds a lock on it; those of processes that were killed are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch_directory"]

_PREFIX = "keepstep-rehearsal-"
_YOUNG_S = 60.0


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """A new one among the temporary files; it is gone afterwards."""
    directory = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        with _locked(directory):
            _remove_left(Path(directory))
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: str | Path) -> Iterator[None]:
    """Hold the lock of `directory`, which ends with the process. Raises OSError where another one holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_left(own: Path) -> None:
    """Remove this user's directories beside `own` that nobody holds; young ones may be about to be locked."""
    about = own.stat()
    for other in own.parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            left = other.lstat()
            if left.st_uid == about.st_uid and left.st_mtime < about.st_mtime - _YOUNG_S:
                with _locked(other):
                    shutil.rmtree(other, ignore_errors=True)
