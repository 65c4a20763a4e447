"""A data stream that can be done again: the batches of an interrupted step, and the same order on another process.

Limits: random draws that a dataset makes inside worker processes, or an IterableDataset's worker shards under
augmentation, are not part of the position: after a swap such draws differ from those the lost rank would have made.
A sampler that draws from a global generator item by item, between other draws of the script, cannot be replayed.
An iterator (a generator) is read forward only; it goes back as far as its batches are kept (`Batches.begin_step`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from keepstep.errors import StateError, UsageError
from keepstep.records.ring import SpanKind
from keepstep.training.rng import capture_rng, fingerprint, generator_state, restore_rng, set_generator_state
from keepstep.training.skipping import (
    forget_iterator,
    generators_of,
    is_stateful,
    open_at,
    reused_iterator,
    set_epoch,
)
from keepstep.training.spans import NO_SPANS, Spans
from keepstep.training.tree import dumps
from keepstep.training.treereader import loads

__all__ = ["Batches"]


@dataclass(frozen=True)
class _Mark:
    """A place in the stream: `consumed` batches into `epoch`; `start` is what the generators were when it began."""

    epoch: int
    consumed: int
    start: dict[str, Any] | None

    @property
    def place(self) -> tuple[int, int]:
        """Grows along the stream."""
        return self.epoch, self.consumed


@dataclass(frozen=True)
class _Made:
    """A batch, the place after it, and the random generators after it was made (None: it drew nothing)."""

    mark: _Mark
    batch: Any
    rng: dict[str, bytes] | None


@dataclass(frozen=True)
class _Own:
    """The loader's own state at `mark`, and its generators there."""

    state: bytes
    mark: _Mark
    generators: list[bytes]


class Batches:
    """An endless iterator over `source`: a DataLoader, a StatefulDataLoader, or any iterable, epoch after epoch.

    `begin_step` marks a boundary, `redo` goes back to it (the same objects come again, and the random generators go
    on from where they stood after the object had been made), `commit` moves the boundary here.
    `position` says where the last boundary is, `seek` takes a fresh process there. `once`: the source is an iterator,
    which does not begin again. `redoable` is False where no step is ever done again: then no batch is kept. `name`
    appears in errors. How long the source takes is told to `spans`, its first batch to `on_first`.
    """

    def __init__(self, source: Any, *, name: str = "data", spans: Spans = NO_SPANS) -> None:
        if not hasattr(source, "__iter__"):
            raise UsageError(f"the data stream {name} is a {type(source).__name__}", remedy="give an iterable")
        self.name = name
        self.redoable = True
        self.once = hasattr(source, "__next__")
        self._source = source
        self._spans = spans
        self.on_first: Callable[[Any], None] | None = None
        self._generators = generators_of(source)
        self.take: Callable[[Any], Any] = next
        self._iterator: Any = None
        self._here = _Mark(0, 0, None)
        self._boundary = self._here
        self._now: list[bytes] = []
        self._taken: list[_Made] = []
        self._again: deque[_Made] = deque()
        self._behind: deque[_Made] = deque()  # of an iterator: what a way back needs,
        self._ahead: deque[_Made] = deque()  # what it gives again after one,
        self._floor = self._here.place  # the first place it can go back to,
        self._begun: dict[int, tuple[int, int]] = {}  # and where the steps since then began
        self._own: _Own | None = None
        self._settle()

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was given last, from 0 on."""
        return self._taken[-1].mark.epoch if self._taken else self._boundary.epoch

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._again or self._ahead:
            made = (self._again or self._ahead).popleft()
            if made.rng is not None:
                restore_rng(made.rng)
        else:
            before = fingerprint()
            with self._spans.span(SpanKind.DATA):
                batch = self._fetch(self.take)
            if self.on_first is not None:
                self.on_first(batch)
                self.on_first = None
            made = _Made(self._here, batch, None if fingerprint() == before else capture_rng())
        if self.redoable:
            self._taken.append(made)
        else:
            self._boundary = made.mark
        return made.batch

    def begin_step(self, version: int = 0, *, oldest: int | None = None) -> None:
        """The step behind `version` updates begins: whatever was taken before counts.

        The batches of an iterator are kept from the step behind `oldest` updates on (None: from this one on), so that
        it can go back there.
        """
        self.commit()
        if self.once:
            self._begun[version] = self._boundary.place
            oldest = version if oldest is None else min(oldest, version)
            self._begun = {step: place for step, place in self._begun.items() if oldest <= step <= version}
            self._keep_from(min(self._begun.values()))
        if self._own is None and not (self._again or self._ahead):
            self._own = self._own_state()

    def redo(self) -> None:
        """The step did not count: its batches come again, in order."""
        self._again.extendleft(reversed(self._taken))
        self._taken.clear()

    def commit(self) -> None:
        """The step counts: its batches are not needed any more."""
        if not self._taken:
            return
        self._boundary = self._taken[-1].mark
        if self.once:
            self._behind.extend(self._taken)
        self._again = deque(replace(made, rng=None) for made in self._again)
        self._taken.clear()
        self._settle()

    def position(self, *, counting: bool = False) -> dict[str, Any]:
        """Where the last boundary is, as a plain tree; costs next to nothing unless the loader keeps own state.

        With `counting`, where it would be if the step under way counted.
        """
        if self._own is None and not (self._taken or self._again or self._ahead):
            self._own = self._own_state()
        there = self._taken[-1].mark if counting and self._taken else self._boundary
        place: dict[str, Any] = {"epoch": there.epoch, "consumed": there.consumed, "own": None}
        place["now"] = self._states() if counting else self._now
        if there.consumed:
            place["start"] = there.start
        if self._own is not None and self._own.mark.epoch == there.epoch:
            own = self._own
            place.update(own=own.state, own_generators=own.generators, skip=there.consumed - own.mark.consumed)
        return place

    def reaches(self, position: dict[str, Any]) -> bool:
        """Whether `seek` can go to `position`: an iterator goes back only as far as its batches are kept."""
        return not self.once or (position["epoch"], position["consumed"]) >= self._floor

    def seek(self, position: dict[str, Any]) -> None:
        """Go to `position`, in a fresh process or back in this one; the generators of the process stay as they are.

        Raises StateError if the stream has fewer batches or is another one, TornRecord for nonsense.
        """
        try:
            epoch, consumed, now = int(position["epoch"]), int(position["consumed"]), list(position["now"])
            start = position["start"] if consumed else None
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not a position in the data: {error}", where=self.name) from error
        if len(now) != len(self._generators):
            raise StateError("the loader has other generators than the one of the lost rank", where=self.name)
        if not self.reaches(position):
            raise StateError("an iterator cannot go back", where=self.name, remedy="give job.data() an iterable")
        mark, begun = _Mark(epoch, consumed, start), self.once and self._here.place > (0, 0)
        before = capture_rng()
        try:
            if begun:
                self._go_on(mark)
            else:
                self._begin_at(mark, position)
        finally:
            restore_rng(before)
        if not begun:
            self._set_generators(now)
        self._boundary = mark
        self._settle()

    def _go_on(self, mark: _Mark) -> None:
        """In an iterator that was begun: give again what is kept from `mark` on, or read what lies before it."""
        kept = [*self._behind, *self._taken, *self._again, *self._ahead]
        self._taken.clear()
        self._again.clear()
        self._behind = deque(made for made in kept if made.mark.place <= mark.place)
        self._ahead = deque(made for made in kept if made.mark.place > mark.place)
        if self._ahead or self._here.place == mark.place:
            return
        with contextlib.suppress(UsageError):  # it ended
            while self._here.place < mark.place:
                self._fetch(next)
        if self._here.place != mark.place:
            raise StateError("the data has fewer batches than the lost rank had read of it", where=self.name)
        self._here = mark
        self._keep_from(mark.place)

    def _keep_from(self, floor: tuple[int, int]) -> None:
        """Nothing goes back behind `floor`."""
        self._floor = max(floor, self._floor)
        while self._behind and self._behind[0].mark.place <= self._floor:
            self._behind.popleft()

    def _begin_at(self, mark: _Mark, position: dict[str, Any]) -> None:
        """From the beginning of an epoch to `mark`."""
        self._iterator = None
        forget_iterator(self._source)
        self._here = mark
        self._taken.clear()
        self._again.clear()
        self._floor = mark.place
        set_epoch(self._source, mark.epoch)
        if mark.start is not None:
            self._reopen(mark.start, position)

    def _reopen(self, start: dict[str, Any], position: dict[str, Any]) -> None:
        """Open the epoch of `self._here` under the generators it began with, and go on from there."""

        def begin() -> None:
            restore_rng(start["rng"])
            self._set_generators(start["generators"])

        own = position["own"]
        if own is None:
            self._iterator = open_at(self._source, self._here.consumed, begin=begin, reused=start["reused"])
            return
        begin()
        if is_stateful(self._source):
            self._source.load_state_dict(loads(own))
            self._iterator = iter(self._source)
        else:
            self._iterator = iter(self._source)
            self._iterator.load_state_dict(loads(own))  # type: ignore[attr-defined]
        self._set_generators(position["own_generators"])
        for _ in range(position["skip"]):
            next(self._iterator)

    def _states(self) -> list[bytes]:
        return [generator_state(generator) for generator in self._generators]

    def _set_generators(self, states: list[bytes]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            set_generator_state(generator, state)

    def _settle(self) -> None:
        """A new boundary: what belongs to the old one is forgotten."""
        self._now = self._states()
        if not (self._again or self._ahead):
            self._own = None

    def _own_state(self) -> _Own | None:
        """The loader's own state at this boundary; None where it has none, or nothing was read yet."""
        if self._iterator is None or self._here.consumed == 0:
            return None
        keeper = self._source if is_stateful(self._source) else self._iterator
        if not is_stateful(keeper):
            return None
        return _Own(dumps(keeper.state_dict()), self._here, self._states())

    def _fetch(self, take: Callable[[Any], Any]) -> Any:
        """The next batch of the source; a finished epoch gives way to the next one."""
        while True:
            if self._iterator is None:
                self._open()
            try:
                batch = take(self._iterator)
            except StopIteration:
                self._roll_over()
                continue
            self._here = _Mark(self._here.epoch, self._here.consumed + 1, self._here.start)
            return batch

    def _open(self) -> None:
        """Begin an epoch."""
        epoch = self._here.epoch
        set_epoch(self._source, epoch)
        start = {"rng": capture_rng(), "generators": self._states(), "reused": reused_iterator(self._source)}
        self._here = _Mark(epoch, 0, start)
        self._iterator = iter(self._source)

    def _roll_over(self) -> None:
        """End an epoch. Raises UsageError for a stream without batches or one that cannot start again."""
        if self._here.consumed == 0:
            raise UsageError(
                f"the data stream {self.name} gives no batches in epoch {self._here.epoch}",
                remedy="give job.data() a loader that can be iterated again and is not empty",
            )
        self._iterator = None
        self._here = _Mark(self._here.epoch + 1, 0, None)
