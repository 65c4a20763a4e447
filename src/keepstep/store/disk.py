"""What the disk said, as errors with a remedy, and directories made durable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from keepstep.errors import StoreError

__all__ = ["disk_error", "sync_directory"]

_REMEDIES = {
    errno.ENOSPC: "free space on that disk or choose another directory; what was written before is intact",
    errno.EDQUOT: "the quota is used up: free space or choose another directory; what was written before is intact",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.EACCES: "choose a directory you may write to",
    errno.EPERM: "choose a directory you may write to",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EIO: "the disk fails: choose a directory on another one",
}


def disk_error(what: str, path: Path, *, error: OSError) -> StoreError:
    """`error` of the operating system as a StoreError that says what to do."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StoreError(f"{what}: {reason}", where=str(path), remedy=_REMEDIES.get(error.errno or 0, "check the path"))


def sync_directory(directory: Path) -> None:
    """Make a new or renamed name in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
