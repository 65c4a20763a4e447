"""Checkpoints without collectives: every rank writes its own files, and a step counts when all of them are there.

`DIR/step-00000010/`: of each rank `__3_0.distcp` (data), `rank-00003.ks` (its private part, where what lies) and
`rank-00003.json` (hashes), and of all `.metadata`, so that `torch.distributed.checkpoint` loads it, too. Members whose
state a lower rank holds write no data.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from keepstep.errors import StateError, StoreError, TornRecord
from keepstep.training.buckets import GradientBuckets, KeptBuckets
from keepstep.training.dcp_metadata import METADATA, has_whole_metadata, write_metadata
from keepstep.training.dcp_names import Described, describe
from keepstep.training.host_memory import Block
from keepstep.training.manifest import Image, Manifest
from keepstep.training.shardfile import (
    FORMAT_VERSION,
    Header,
    Page,
    data_name,
    file_name,
    page_name,
    read_header,
    read_page,
    sha256_of,
    write_data,
    write_header,
    write_page,
)
from keepstep.training.state import TrackedState
from keepstep.training.state_copy import StateCopy

__all__ = ["CheckpointWriter", "Giver", "load", "step_directory", "valid_steps"]

_log = logging.getLogger("keepstep.checkpoint")


class Giver(Protocol):
    """Whoever has state to be kept and takes it back (`TrackedState`)."""

    gradient_buckets: GradientBuckets

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
    """What one rank writes; `copy` is None where another rank holds the state."""

    step: int
    private: bytes
    replica: str
    holder: int
    written_in: str = ""
    copy: StateCopy | None = None
    described: Described | None = None
    buckets: tuple[KeptBuckets, ...] = ()


def step_directory(directory: Path, step: int) -> Path:
    """Where the files of `step` lie."""
    return directory / f"step-{step:08d}"


class CheckpointWriter:
    """Writes the checkpoints of one rank in a thread, one at a time, and keeps the newest `keep` complete steps.

    Steps that it has neither written nor loaded do not count: another rank may have found them damaged, or another job
    may have left them.

    What goes wrong (a full disk, no memory for the copy) is told to `on_problem` (default: a log warning) once, until
    writing works again; training goes on. `alone`: the directory is this node's; every rank writes its whole state and
    looks at no other's.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world: int,
        keep: int = 3,
        alone: bool = False,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._world = world
        self._keep = max(1, keep)
        self._ranks: Sequence[int] = (rank,) if alone else range(world)
        self._alone = alone
        self._on_problem = on_problem or _log.warning
        self.on_written: Callable[[int], None] | None = None  # called in the writing thread with the step
        self._thread: threading.Thread | None = None
        self._block: Block | None = None
        self._copy: StateCopy | None = None
        self._failing = False
        self._known: set[int] = set()  # steps written or loaded here
        self._complete: set[int] = set()  # those of them whose parts were all seen
        self._last = 0

    def save(
        self,
        step: int,
        state: TrackedState,
        *,
        private: bytes,
        replicas: Mapping[int, str] | None = None,
        written_in: str = "",
    ) -> None:
        """Have the state copied to host memory and written; waits only while the one before is being written.

        `replicas` are the replica keys of all ranks: state that a lower rank holds is not written again.
        `written_in` names the job and generation, alike on all ranks. The state may change only when `settle` has
        returned.
        """
        self.wait()
        replica = state.replica_key()
        held = {rank for rank, key in (replicas or {}).items() if key == replica and not self._alone}
        holder = min(held | {self._rank})
        part = _Part(step, private, replica, holder, written_in, buckets=state.gradient_buckets.kept())
        if holder == self._rank:
            image = state.image(whole=True)
            block = self._room(step, image.manifest.nbytes)
            if block is None:
                return
            self._copy = StateCopy(image, block, version=step, private=private)
            part = replace(part, copy=self._copy, described=describe(state, image.manifest))
        self._thread = threading.Thread(target=self._run, args=(part,), name=f"checkpoint-{step}")
        self._thread.start()

    def _room(self, step: int, nbytes: int) -> Block | None:
        """Host memory for a copy; None, which is told, where the system gives none."""
        if self._block is None or self._block.nbytes != nbytes:
            self._block = None
            try:
                self._block = Block(nbytes)
            except OSError as error:
                self._tell(step, error, remedy=f"free memory on this node: a copy takes {nbytes // 1_000_000} MB")
        return self._block

    def settle(self) -> None:
        """The state is about to change: wait until it is copied."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def valid_steps(self) -> tuple[list[int], list[str]]:
        """As the function, for this rank and directory, after what is being written. Rank 0 sees to `.metadata`."""
        self.wait()
        steps, skipped = valid_steps(self._directory, rank=self._rank, world=self._world, ranks=self._ranks)
        if self._rank == 0 and not self._alone:
            for step in steps:
                self._renew_metadata(step)
        return steps, skipped

    def newest(self, version: int) -> int:
        """The newest step up to `version` that this rank has written or loaded here; -1: none."""
        return max((step for step in tuple(self._known) if step <= version), default=-1)

    def private(self, step: int) -> bytes:
        """The private part of this rank in a step that is valid."""
        return read_header(step_directory(self._directory, step) / file_name(self._rank))[0].private

    def written_in(self, step: int) -> str:
        """The job and generation in which the part of this rank in a valid step was written."""
        return read_page(step_directory(self._directory, step) / page_name(self._rank)).written_in

    def load(self, step: int, state: Giver) -> bytes:
        """As the function, for this rank and directory, after what is being written."""
        self.wait()
        private = load(self._directory, step, rank=self._rank, world=self._world, state=state, ranks=self._ranks)
        self._known.add(step)
        return private

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Finish writing and free the copy."""
        self.wait()
        self._block = None

    def _run(self, part: _Part) -> None:
        if part.copy is not None:
            part.copy.run()
        try:
            self._write(part)
            self._known.add(part.step)
            self._last = part.step
            self.retain()
        except OSError as error:
            self._tell(part.step, error, remedy=_remedy(error, self._directory))
            return
        self._failing = False
        if self.on_written is not None:
            self.on_written(part.step)

    def _tell(self, step: int, error: OSError, *, remedy: str) -> None:
        """Say why a checkpoint was not written, once until one is again."""
        if not self._failing:
            self._on_problem(
                f"checkpoint of step {step} was not written: {error}; training goes on without it -> {remedy}"
            )
        self._failing = True

    def _write(self, part: _Part) -> None:
        """Data, header, page, in this order; what was there of the same step counts no more. Raises OSError."""
        rank, place = self._rank, step_directory(self._directory, part.step)
        place.mkdir(parents=True, exist_ok=True)
        self._complete.discard(part.step)
        for name in (METADATA, page_name(rank)):
            (place / name).unlink(missing_ok=True)
        header, data_nbytes, data_sha256 = Header(part.private, buckets=part.buckets), 0, ""
        if part.copy is not None and part.described is not None:
            manifest = part.copy.manifest
            buffers = part.copy.views()
            contents, sink = write_data(place / data_name(rank), manifest, buffers=buffers, described=part.described)
            header = Header(part.private, manifest.encode(), contents, part.buckets)
            data_nbytes, data_sha256 = sink.nbytes, sink.sha256
        nbytes, digest = write_header(place / file_name(rank), header)
        page = Page(
            version=FORMAT_VERSION,
            step=part.step,
            world=self._world,
            rank=rank,
            replica=part.replica,
            holder=part.holder,
            nbytes=nbytes,
            sha256=digest,
            data_nbytes=data_nbytes,
            data_sha256=data_sha256,
            written_in=part.written_in,
        )
        write_page(place / page_name(rank), page)
        self._join(place, part.step)

    def _join(self, place: Path, step: int) -> None:
        """Whoever finds all parts there makes the file by which `torch.distributed.checkpoint` finds its way."""
        if not _all_written(self._directory, step, ranks=range(self._world), world=self._world):
            return
        try:
            headers = (read_header(place / file_name(rank))[0] for rank in range(self._world))
            write_metadata(place, [one.contents for one in headers if one.contents is not None], rank=self._rank)
        except TornRecord as error:
            _log.warning("the checkpoint of step %d is whole only for keepstep: %s", step, error)

    def _renew_metadata(self, step: int) -> None:
        """Write `.metadata` of a valid step anew where it is not the one that was written."""
        place = step_directory(self._directory, step)
        try:
            whole = has_whole_metadata(place)
            if whole or not _all_written(self._directory, step, ranks=self._ranks, world=self._world):
                return
            self._on_problem(f"checkpoint of step {step}: {METADATA} is damaged or not there; it is made anew")
            self._join(place, step)
        except OSError as error:
            self._on_problem(
                f"checkpoint of step {step}: {METADATA} cannot be made anew: {error}; keepstep itself does not need it "
                f"-> {_remedy(error, self._directory)}"
            )

    def retain(self) -> None:
        """Remove the own files of steps older than the newest `keep` complete ones; done after every checkpoint.

        The others may still be writing then: one step more than `keep` stays until the next time. Steps behind the one
        written last are left alone: the job has gone back and will come to them again. Raises OSError.
        """
        complete = [step for step in sorted(self._known) if step <= self._last and self._is_complete(step)]
        if len(complete) < self._keep:
            return
        oldest = complete[-self._keep]
        self._known = {step for step in self._known if step >= oldest}
        self._complete &= self._known
        for step in _steps(self._directory):
            if step >= oldest:
                break
            place = step_directory(self._directory, step)
            names = (page_name(self._rank), file_name(self._rank), data_name(self._rank))
            for name in (METADATA, *names, *(f".{name}.tmp" for name in names)):
                (place / name).unlink(missing_ok=True)
            _remove_empty(place)

    def _is_complete(self, step: int) -> bool:
        """Whether all parts are there that this rank must see."""
        if step not in self._complete and _all_written(self._directory, step, ranks=self._ranks, world=self._world):
            self._complete.add(step)
        return step in self._complete


def _remedy(error: OSError, directory: Path) -> str:
    """What to do about files that cannot be written."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"move {error.filename or directory} away: there must be a directory"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"let the job write under {directory}"
    return f"free space under {directory}"


def _remove_empty(place: Path) -> None:
    """Remove a directory unless other ranks still have files there; another rank may also have been faster."""
    try:
        place.rmdir()
    except OSError:
        return


def _steps(directory: Path) -> list[int]:
    """The steps that have a directory, ascending."""
    return [step for step, place in _places(directory) if place.is_dir()]


def _places(directory: Path) -> list[tuple[int, Path]]:
    """What is named like the directory of a step, ascending."""
    named = ((place.name.removeprefix("step-"), place) for place in directory.glob("step-*"))
    return sorted((int(number), place) for number, place in named if number.isdecimal())


def _missing(directory: Path, step: int, *, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` whose file or page is not there."""
    place = step_directory(directory, step)
    return [rank for rank in ranks if not ((place / page_name(rank)).exists() and (place / file_name(rank)).exists())]


def _all_written(directory: Path, step: int, *, ranks: Sequence[int], world: int) -> bool:
    """Whether the parts of `ranks` are there, written by `world` ranks in one generation of one job."""
    if _missing(directory, step, ranks=ranks):
        return False
    place = step_directory(directory, step)
    try:
        pages = [read_page(place / page_name(rank)) for rank in ranks]
    except (TornRecord, OSError):
        return False
    return {(page.world, page.written_in) for page in pages} == {(world, pages[0].written_in)}


def _check(directory: Path, step: int, *, rank: int, world: int) -> Page:
    """The page of `rank` after its file was compared with it. Raises TornRecord saying what is wrong, OSError."""
    place = step_directory(directory, step)
    page = read_page(place / page_name(rank))
    if page.world != world:
        raise TornRecord(f"it was written by {page.world} ranks, this job has {world}")
    if page.rank != rank or page.step != step:
        raise TornRecord(f"{page_name(rank)} belongs to rank {page.rank} in step {page.step}")
    expected = [(place / file_name(rank), page.nbytes, page.sha256)]
    if page.data_sha256:
        expected.append((place / data_name(rank), page.data_nbytes, page.data_sha256))
    for path, nbytes, digest in expected:
        if not path.exists():
            raise TornRecord(f"{path.name} is missing")
        if path.stat().st_size != nbytes:
            raise TornRecord(f"{path.name} is torn: {path.stat().st_size} of {nbytes} bytes")
        if sha256_of(path) != digest:
            raise TornRecord(f"{path.name} is corrupt: its SHA-256 is not the one in {page_name(rank)}")
    return page


def _check_step(directory: Path, step: int, *, rank: int, world: int, ranks: Sequence[int]) -> Page:
    """The parts of `ranks` are there, and those that `rank` needs are whole. Raises TornRecord, OSError."""
    missing = _missing(directory, step, ranks=ranks)
    if missing:
        raise TornRecord(f"the parts of ranks {missing} are missing")
    page = _check(directory, step, rank=rank, world=world)
    if page.holder != rank:
        holder = _check(directory, step, rank=page.holder, world=world)
        if holder.holder != page.holder or holder.replica != page.replica:
            raise TornRecord(f"rank {page.holder} does not hold the state of rank {rank}")
        if holder.written_in != page.written_in:
            raise TornRecord(f"the parts of ranks {rank} and {page.holder} were not written in one generation")
    return page


def valid_steps(
    directory: Path, *, rank: int, world: int, ranks: Sequence[int] | None = None
) -> tuple[list[int], list[str]]:
    """The steps that `rank` could load, ascending, and one line for each that it skips.

    A step counts if the parts of all `ranks` (None: of the world) are there and those that `rank` needs have the right
    hash.
    """
    steps: list[int] = []
    skipped = [f"step {step}: {at.name} is no directory" for step, at in _places(Path(directory)) if not at.is_dir()]
    for step in _steps(Path(directory)):
        try:
            _check_step(Path(directory), step, rank=rank, world=world, ranks=ranks or range(world))
        except (TornRecord, OSError) as error:
            what = error.what if isinstance(error, TornRecord) else str(error)
            skipped.append(f"step {step}: {what}")
        else:
            steps.append(step)
    return steps, skipped


def load(
    directory: Path, step: int, *, rank: int, world: int, state: Giver, ranks: Sequence[int] | None = None
) -> bytes:
    """Put the state of `step` into `state` and give back the private part of `rank`.

    Checks hashes first: the state is not touched by a damaged checkpoint. Raises StoreError for one, StateError where
    it does not fit this member.
    """
    place = step_directory(Path(directory), step)
    try:
        page = _check_step(Path(directory), step, rank=rank, world=world, ranks=ranks or range(world))
        if page.replica != state.replica_key():
            raise StateError(
                "the checkpoint holds the state of other modules or shards",
                where=str(place),
                remedy="load it with the script, arguments and layout that wrote it",
            )
        own = read_header(place / file_name(rank))[0]
        header, start = read_header(place / file_name(page.holder))
        manifest = header.layout()
        if manifest is None:
            raise TornRecord(f"{file_name(page.holder)} holds no state")
        contents = header.contents
        path = place / (file_name(page.holder) if contents is None else data_name(page.holder))
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            for number, view in enumerate(state.adopt(manifest)):
                if contents is not None and len(view):
                    file.seek(contents.places[number].start)
                _fill(file.readinto, view, holder=page.holder)
    except (TornRecord, OSError) as error:
        raise StoreError(f"checkpoint of step {step} cannot be loaded: {error}", where=str(place)) from error
    state.adopted()
    state.gradient_buckets.go_on(own.buckets)
    return own.private


def _fill(readinto: Callable[[memoryview], int | None], view: memoryview, *, holder: int) -> None:
    """Read until `view` is full. Raises TornRecord."""
    done = 0
    while done < len(view):
        count = readinto(view[done:])
        if not count:
            raise TornRecord(f"{file_name(holder)} ends early")
        done += count
