"""The file a controller leaves for the one that takes over from it: `state/controller.json`, for its owner only."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keepstep import __version__
from keepstep.errors import StoreError, UsageError, VersionMismatch
from keepstep.service.job_host import LeftJob
from keepstep.service.run_directory import LEFT_FILE, STATE_FOLDER, RunDirectory, read_run

__all__ = ["keep_left", "read_left"]

_MAX_BYTES = 4 * 1024 * 1024


def keep_left(directory: RunDirectory, left: LeftJob) -> None:
    """Leave `left` in the run directory, with mode 0600: it holds the data plane's secret. Raises StoreError."""
    path = directory.path / STATE_FOLDER / LEFT_FILE
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(left))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror}", where=str(path)) from error


def read_left(path: Path) -> LeftJob:
    """What the controller of the run in `path` left. Raises UsageError where it left nothing that can be read, and
    VersionMismatch where it was another version: the job machine of one may not lead what another one has decided."""
    run = read_run(path)
    file = path / STATE_FOLDER / LEFT_FILE
    if file.exists() and run.keepstep_version != __version__:
        raise VersionMismatch(
            f"job {run.job} was begun by keepstep {run.keepstep_version}, this is {__version__}",
            where=str(path),
            remedy="take it over with the version that began it, while its agents wait (controller_patience_s)",
        )
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError("controller.json is too large to be one", where=str(file))
        return msgspec.json.decode(file.read_bytes(), type=LeftJob)
    except OSError as error:
        raise UsageError(
            f"job {run.job} has no controller that could be replaced ({error.strerror})",
            where=str(file),
            remedy="only jobs of `keepstep controller` can be taken over; `keepstep run` ends with its processes",
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"controller.json is damaged: {error}", where=str(file)) from error
