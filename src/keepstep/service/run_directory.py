"""The run directory: one job, one writer, never mixed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from keepstep.errors import EnvironmentProblem, KeepstepError, StoreError, UsageError
from keepstep.store.journal import JOURNAL_NAME

__all__ = [
    "CANARY_FOLDER",
    "LEFT_FILE",
    "REPORT_FILE",
    "RUN_FILE",
    "STATE_FOLDER",
    "TOKEN_FILE",
    "RunDirectory",
    "RunFacts",
    "is_closed",
    "is_left",
    "is_running",
    "mount_of",
    "not_allowed",
    "read_run",
]

RUN_FILE = "run.json"
REPORT_FILE = "report.json"
TOKEN_FILE = "token"
STATE_FOLDER = "state"
LEFT_FILE = "controller.json"
CANARY_FOLDER = "canary"
_LOCK_FILE = "run.lock"
_MAX_RUN_FILE_BYTES = 1024 * 1024


class RunFacts(msgspec.Struct, frozen=True):
    """The contents of run.json. `control` is the abstract socket drills talk to (empty in the directory of an agent),
    `created` wall-clock seconds.
    """

    job: str
    script: str
    arguments: tuple[str, ...]
    world: int
    standbys: int
    nodes: int
    keepstep_version: str
    python_version: str
    torch_version: str
    created: float
    pid: int
    control: str


class RunDirectory:
    """A directory this process holds for one job until `close()`."""

    def __init__(self, path: Path, *, reserve_bytes: int, take_over: bool = False) -> None:
        """Make and lock `path`; with `take_over` it must hold a run that nobody leads. Raises UsageError if it holds
        something else, EnvironmentProblem if it cannot be written."""
        self.path = path
        self.logs = path / "logs"
        self._published = take_over
        self._made = not path.exists()
        self._found = frozenset(name for name in (TOKEN_FILE, _LOCK_FILE) if os.path.exists(path / name))
        if take_over:
            read_run(path)
        self._lock = _take(path)
        try:
            (_refuse_if_over if take_over else _refuse_other_contents)(path)
        except KeepstepError:
            if _LOCK_FILE not in self._found:
                with contextlib.suppress(OSError):
                    (path / _LOCK_FILE).unlink()
            os.close(self._lock)
            raise
        try:
            free = shutil.disk_usage(path).free
            if free < reserve_bytes:
                raise EnvironmentProblem(
                    f"disk is full: {free >> 20} MiB free, {reserve_bytes >> 20} MiB wanted",
                    where=str(path),
                    remedy="free space, choose another --run, or set reserve_bytes lower",
                )
            self.logs.mkdir(exist_ok=take_over)
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from error
        except KeepstepError:
            self.close()
            raise

    def publish(self, facts: RunFacts) -> None:
        """Write run.json; from now on others find the run. Raises EnvironmentProblem."""
        self._published = True
        try:
            self._write(RUN_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
        except OSError as error:
            raise _unwritable(self.path / RUN_FILE, error) from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run whole or not at all. Raises StoreError."""
        try:
            self._write(name, data)
        except OSError as error:
            remedy = f"free space on the disk mounted at {mount_of(self.path)}"
            raise StoreError(f"cannot write: {error.strerror}", where=str(self.path / name), remedy=remedy) from error

    def _write(self, name: str, data: bytes) -> None:
        target = self.path / name
        part = target.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def close(self) -> None:
        """Let go of the directory; one that never became a run is left as it was found."""
        if not self._published:
            self._undo()
        os.close(self._lock)

    def _undo(self) -> None:
        for folder in (self.logs, self.path / STATE_FOLDER):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            for name in {JOURNAL_NAME, TOKEN_FILE, _LOCK_FILE} - self._found:
                (self.path / name).unlink(missing_ok=True)
            if self._made:
                self.path.rmdir()


def read_run(path: Path) -> RunFacts:
    """What run.json of `path` says. Raises UsageError where there is no run, or this user may not read it."""
    file = path / RUN_FILE
    try:
        if file.stat().st_size > _MAX_RUN_FILE_BYTES:
            raise UsageError("run.json is too large to be one", where=str(file))
        return msgspec.json.decode(file.read_bytes(), type=RunFacts)
    except PermissionError as error:
        raise not_allowed(path) from error
    except OSError as error:
        raise UsageError(
            "not a run directory", where=str(path), remedy="give the DIR that `keepstep run` printed"
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"run.json is damaged: {error}", where=str(file)) from error


def is_running(path: Path) -> bool:
    """Whether a process holds the directory now."""
    try:
        lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def is_closed(path: Path) -> bool:
    """Whether this user may not know if a process holds the directory: only whoever started the run may."""
    lock = path / _LOCK_FILE
    return lock.exists() and not os.access(lock, os.R_OK | os.W_OK, effective_ids=True)


def not_allowed(path: Path) -> UsageError:
    """What to say to another user than the one who started the run in `path`."""
    return UsageError(
        "this user may not read the run directory",
        where=str(path),
        remedy="give the command as the user who started the job, or as root",
    )


def is_left(path: Path) -> bool:
    """Whether the job in `path` has not ended, as far as is known, and another controller may take it over."""
    return (path / STATE_FOLDER / LEFT_FILE).exists() and not (path / REPORT_FILE).exists()


def mount_of(path: Path) -> Path:
    """Where the disk that holds `path` is mounted."""
    here = path.resolve()
    return next(place for place in (here, *here.parents) if place.is_mount())


def _take(path: Path) -> int:
    """Make the directory and lock it; the descriptor holds the lock."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UsageError("another run is going on in this directory", where=str(path), remedy=_OTHER) from error
    return lock


def _refuse_other_contents(path: Path) -> None:
    found = sorted(entry.name for entry in path.iterdir() if entry.name not in (_LOCK_FILE, CANARY_FOLDER, TOKEN_FILE))
    if RUN_FILE in found:
        state = "finished" if REPORT_FILE in found else "ended without a report"
        raise UsageError(f"directory holds job {read_run(path).job}, which has {state}", where=str(path), remedy=_OTHER)
    if found:
        raise UsageError(f"directory is not empty and holds no run: {found[0]}", where=str(path), remedy=_OTHER)


def _refuse_if_over(path: Path) -> None:
    if (path / REPORT_FILE).exists():
        raise UsageError(f"job {read_run(path).job} has finished", where=str(path), remedy="see `keepstep report`")


def _unwritable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot write: {error.strerror}", where=str(path), remedy="free space or choose another --run"
    )


_OTHER = "runs are never mixed: give another --run DIR"
