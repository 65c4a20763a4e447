"""Checkpoints without collectives: every rank writes its own file, and a step counts when all files are there.

`DIR/step-00000010/rank-00003.ks` and its page `rank-00003.json`. Members whose state a lower rank holds write only
their private part.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.errors import StateError, StoreError, TornRecord
from keepstep.training.manifest import Image, Manifest
from keepstep.training.shardfile import (
    FORMAT_VERSION,
    Header,
    Page,
    file_name,
    page_name,
    read_header,
    read_page,
    sha256_of,
    write_page,
    write_shard,
)

__all__ = ["CheckpointWriter", "Giver", "load", "step_directory", "valid_steps"]

_log = logging.getLogger("keepstep.checkpoint")


class Giver(Protocol):
    """Whoever has state to be kept and takes it back (`TrackedState`)."""

    def image(self) -> Image:
        """The state as it is now."""

    def replica_key(self) -> str:
        """Names the members that hold the same state."""

    def adopt(self, manifest: Manifest) -> list[memoryview]:
        """Make room; the views are where the bytes go."""

    def adopted(self) -> None:
        """All bytes are there."""


@dataclass(frozen=True)
class _Part:
    """One file to write, copied out of the live state."""

    step: int
    header: Header
    buffers: list[memoryview]
    replica: str
    holder: int


def step_directory(directory: Path, step: int) -> Path:
    """Where the files of `step` lie."""
    return directory / f"step-{step:08d}"


class CheckpointWriter:
    """Writes the checkpoints of one rank in a thread, one at a time, and keeps the newest `keep` complete steps.

    What goes wrong (a full disk) is told to `on_problem` (default: a log warning) once, until writing works again;
    training goes on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world: int,
        keep: int = 3,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._world = world
        self._keep = max(1, keep)
        self._on_problem = on_problem or _log.warning
        self.on_written: Callable[[int], None] | None = None  # called in the writing thread with the step
        self._thread: threading.Thread | None = None
        self._memory: list[bytearray] = []
        self._failing = False

    def save(self, step: int, state: Giver, *, private: bytes, replicas: Mapping[int, str] | None = None) -> None:
        """Copy the state to host memory and have it written; waits only while the one before is being written.

        `replicas` are the replica keys of all ranks: state that a lower rank holds is not written again.
        """
        self.wait()
        replica = state.replica_key()
        holder = min((rank for rank, key in (replicas or {}).items() if key == replica), default=self._rank)
        holder = min(holder, self._rank)
        header, buffers = Header(private), []
        if holder == self._rank:
            image = state.image()
            header = Header(private, image.manifest.encode())
            buffers = self._copy(image.buffers)
        part = _Part(step, header, buffers, replica, holder)
        self._thread = threading.Thread(target=self._write, args=(part,), name=f"checkpoint-{step}")
        self._thread.start()

    def valid_steps(self) -> tuple[list[int], list[str]]:
        """As the function, for this rank and directory, after what is being written."""
        self.wait()
        return valid_steps(self._directory, rank=self._rank, world=self._world)

    def load(self, step: int, state: Giver) -> bytes:
        """As the function, for this rank and directory, after what is being written."""
        self.wait()
        return load(self._directory, step, rank=self._rank, world=self._world, state=state)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish writing and free the copies."""
        self.wait()
        self._memory.clear()

    def _copy(self, buffers: list[memoryview]) -> list[memoryview]:
        """Copies of `buffers`, in memory that is used again for every checkpoint."""
        if [len(memory) for memory in self._memory] != [len(buffer) for buffer in buffers]:
            self._memory = [bytearray(len(buffer)) for buffer in buffers]
        views = [memoryview(memory) for memory in self._memory]
        for view, buffer in zip(views, buffers, strict=True):
            view[:] = buffer
        return views

    def _write(self, part: _Part) -> None:
        place = step_directory(self._directory, part.step)
        try:
            place.mkdir(parents=True, exist_ok=True)
            (place / page_name(self._rank)).unlink(missing_ok=True)
            nbytes, digest = write_shard(place / file_name(self._rank), part.header, buffers=part.buffers)
            page = Page(FORMAT_VERSION, part.step, self._world, self._rank, part.replica, part.holder, nbytes, digest)
            write_page(place / page_name(self._rank), page)
            self.retain()
        except OSError as error:
            if not self._failing:
                self._on_problem(
                    f"checkpoint of step {part.step} was not written: {error}; training goes on without it "
                    f"-> free space under {self._directory}"
                )
            self._failing = True
            return
        self._failing = False
        if self.on_written is not None:
            self.on_written(part.step)

    def retain(self) -> None:
        """Remove the own files of steps older than the newest `keep` complete ones; done after every checkpoint.

        The others may still be writing then: one step more than `keep` stays until the next time. Raises OSError.
        """
        steps = _steps(self._directory)
        complete = [step for step in steps if not _missing(self._directory, step, world=self._world)]
        if len(complete) < self._keep:
            return
        for step in steps:
            if step >= complete[-self._keep]:
                break
            place = step_directory(self._directory, step)
            for name in (page_name(self._rank), file_name(self._rank), f".{file_name(self._rank)}.tmp"):
                (place / name).unlink(missing_ok=True)
            _remove_empty(place)


def _remove_empty(place: Path) -> None:
    """Remove a directory unless other ranks still have files there; another rank may also have been faster."""
    try:
        place.rmdir()
    except OSError:
        return


def _steps(directory: Path) -> list[int]:
    """The steps that have a directory, ascending."""
    found = []
    for place in directory.glob("step-*"):
        number = place.name.removeprefix("step-")
        if number.isdigit() and place.is_dir():
            found.append(int(number))
    return sorted(found)


def _missing(directory: Path, step: int, *, world: int) -> list[int]:
    """The ranks whose file or page is not there."""
    place = step_directory(directory, step)
    return [
        rank for rank in range(world) if not ((place / page_name(rank)).exists() and (place / file_name(rank)).exists())
    ]


def _check(directory: Path, step: int, *, rank: int, world: int) -> Page:
    """The page of `rank` after its file was compared with it. Raises TornRecord saying what is wrong, OSError."""
    place = step_directory(directory, step)
    page = read_page(place / page_name(rank))
    if page.world != world:
        raise TornRecord(f"it was written by {page.world} ranks, this job has {world}")
    if page.rank != rank or page.step != step:
        raise TornRecord(f"{page_name(rank)} belongs to rank {page.rank} in step {page.step}")
    path = place / file_name(rank)
    if path.stat().st_size != page.nbytes:
        raise TornRecord(f"{path.name} is torn: {path.stat().st_size} of {page.nbytes} bytes")
    if sha256_of(path) != page.sha256:
        raise TornRecord(f"{path.name} is corrupt: its SHA-256 is not the one in {page_name(rank)}")
    return page


def _check_step(directory: Path, step: int, *, rank: int, world: int) -> Page:
    """All parts are there, and those that `rank` needs are whole. Raises TornRecord, OSError."""
    missing = _missing(directory, step, world=world)
    if missing:
        raise TornRecord(f"the parts of ranks {missing} are missing")
    page = _check(directory, step, rank=rank, world=world)
    if page.holder != rank:
        holder = _check(directory, step, rank=page.holder, world=world)
        if holder.holder != page.holder or holder.replica != page.replica:
            raise TornRecord(f"rank {page.holder} does not hold the state of rank {rank}")
    return page


def valid_steps(directory: Path, *, rank: int, world: int) -> tuple[list[int], list[str]]:
    """The steps that `rank` could load, ascending, and one line for each that it skips.

    A step counts if the parts of all ranks are there and those that `rank` needs have the right hash.
    """
    steps, skipped = [], []
    for step in _steps(Path(directory)):
        try:
            _check_step(Path(directory), step, rank=rank, world=world)
        except (TornRecord, OSError) as error:
            what = error.what if isinstance(error, TornRecord) else str(error)
            skipped.append(f"step {step}: {what}")
        else:
            steps.append(step)
    return steps, skipped


def load(directory: Path, step: int, *, rank: int, world: int, state: Giver) -> bytes:
    """Put the state of `step` into `state` and give back the private part of `rank`.

    Checks hashes first: the state is not touched by a damaged checkpoint. Raises StoreError for one, StateError where
    it does not fit this member.
    """
    place = step_directory(Path(directory), step)
    try:
        page = _check_step(Path(directory), step, rank=rank, world=world)
        if page.replica != state.replica_key():
            raise StateError(
                "the checkpoint holds the state of other modules or shards",
                where=str(place),
                remedy="load it with the script, arguments and layout that wrote it",
            )
        private = read_header(place / file_name(rank))[0].private
        header, start = read_header(place / file_name(page.holder))
        manifest = header.layout()
        if manifest is None:
            raise TornRecord(f"{file_name(page.holder)} holds no state")
        with (place / file_name(page.holder)).open("rb", buffering=0) as file:
            file.seek(start)
            for view in state.adopt(manifest):
                _fill(file.readinto, view, holder=page.holder)
    except (TornRecord, OSError) as error:
        raise StoreError(f"checkpoint of step {step} cannot be loaded: {error}", where=str(place)) from error
    state.adopted()
    return private


def _fill(readinto: Callable[[memoryview], int | None], view: memoryview, *, holder: int) -> None:
    """Read until `view` is full. Raises TornRecord."""
    done = 0
    while done < len(view):
        count = readinto(view[done:])
        if not count:
            raise TornRecord(f"{file_name(holder)} ends early")
        done += count
