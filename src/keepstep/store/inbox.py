"""A bounded line of things that arrived, read by one task of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.errors import KeepstepError

__all__ = ["Inbox"]

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """Things in order, then an end. `take` may be cancelled without losing anything.

    `on_room` is called when the line has become shorter than `limit` again; the feeder stops while `full`.
    """

    def __init__(self, *, limit: int, on_room: Callable[[], None] | None = None) -> None:
        self._things: deque[_T] = deque()
        self._limit = limit
        self._on_room = on_room
        self._changed = asyncio.Event()
        self._end: KeepstepError | None = None

    @property
    def full(self) -> bool:
        """True while the feeder should stop."""
        return len(self._things) >= self._limit

    def put(self, thing: _T) -> None:
        """Add one at the end of the line. Ignored after `end`."""
        if self._end is None:
            self._things.append(thing)
            self._changed.set()

    def end(self, why: KeepstepError) -> None:
        """Nothing more will come: `take` raises `why` once the line is empty. Only the first end counts."""
        if self._end is None:
            self._end = why
            self._changed.set()

    async def take(self) -> _T:
        """The next thing. Raises what `end` was given once all was taken."""
        while not self._things:
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        was_full = self.full
        thing = self._things.popleft()
        if was_full and not self.full and self._on_room is not None:
            self._on_room()
        return thing
