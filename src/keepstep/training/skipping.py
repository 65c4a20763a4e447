"""Where data comes from: what a loader is made of, and how to open it in mid-epoch without fetching what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from keepstep.errors import StateError

__all__ = ["forget_iterator", "generators_of", "is_stateful", "open_at", "reused_iterator", "set_epoch"]


class _Skipping:
    """A sampler that drops its first `count` items, once, and draws from its generators as if it had given them.

    While `empty`, it has no items at all (and draws nothing).
    """

    def __init__(self, inner: Any, count: int) -> None:
        self._inner = inner
        self._count = count
        self.empty = False
        self._items: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        if self.empty:
            return iter(())
        self._items = iter(self._inner)
        return self if self._count else self._items

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)

    def skip(self) -> None:
        """Drop the items now. Raises StateError if there are fewer."""
        while self._count:
            self._count -= 1
            if next(self._items, self) is self:
                raise StateError("the data has fewer batches than the lost rank had read of it")


def is_stateful(source: Any) -> bool:
    """True where the loader can give and take its own state."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _parts(source: Any) -> list[Any]:
    """The loader, its samplers and its dataset: whatever may have an epoch or a generator."""
    batch_sampler = getattr(source, "batch_sampler", None)
    found = [source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found.append(getattr(source, "dataset", None))
    parts: list[Any] = []
    for part in found:
        if part is not None and not any(part is other for other in parts):
            parts.append(part)
    return parts


def set_epoch(source: Any, epoch: int) -> None:
    """Tell the epoch to every part that has a set_epoch()."""
    for part in _parts(source):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def generators_of(source: Any) -> list[torch.Generator]:
    """The torch generators given to the loader or its samplers."""
    found: list[torch.Generator] = []
    for part in _parts(source):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found


def forget_iterator(source: Any) -> None:
    """Make a DataLoader with persistent workers begin as if it had never been iterated."""
    if isinstance(source, DataLoader):
        source.__dict__["_iterator"] = None


def reused_iterator(source: Any) -> bool:
    """True where the next epoch goes to the workers of the one before (persistent_workers): it draws one seed less."""
    return getattr(source, "persistent_workers", False) and getattr(source, "_iterator", None) is not None


def open_at(source: Any, consumed: int, *, begin: Callable[[], None], reused: bool) -> Iterator[Any]:
    """An iterator over `source` that begins after `consumed` batches; `begin` sets the generators of its epoch.

    A map-style DataLoader skips in its sampler, without fetching data; anything else reads and drops. `reused` is
    what `reused_iterator` said before the epoch began. Raises StateError if there are fewer batches.
    """
    if _skips_by_index(source):
        return _open_loader(source, consumed, begin=begin, reused=reused)
    begin()
    iterator = iter(source)
    for _ in range(consumed):
        if next(iterator, _END) is _END:
            raise StateError("the data has fewer batches than the lost rank had read of it")
    return iterator


_END = object()


def _skips_by_index(source: Any) -> bool:
    """True for a DataLoader over a map-style dataset whose way of iterating is torch's own."""
    return (
        isinstance(source, DataLoader)
        and type(source).__iter__ is DataLoader.__iter__
        and not isinstance(source.dataset, torch.utils.data.IterableDataset)
    )


def _open_loader(loader: Any, consumed: int, *, begin: Callable[[], None], reused: bool) -> Iterator[Any]:
    """torch reads its sampler from the loader when an iterator is made: it finds a skipping one there, that once."""
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, attribute)
    skipping = _Skipping(sampler, consumed)
    loader.__dict__[attribute] = skipping
    try:
        if reused:
            skipping.empty = True
            iter(loader)
            skipping.empty = False
        begin()
        iterator = iter(loader)
        skipping.skip()
    finally:
        loader.__dict__[attribute] = sampler
    return iterator
