"""A device without hardware: its streams are threads that work off a queue, so that an order not asked for shows.

"Device tensors" are CPU tensors; only work that was put on a stream may touch them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import torch

from keepstep.training.copier import Copier

__all__ = ["StandInDevice"]


class _Event:
    def __init__(self) -> None:
        self._past = threading.Event()
        self.awaited = threading.Event()

    def reached(self) -> None:
        self._past.set()

    def query(self) -> bool:
        return self._past.is_set()

    def synchronize(self) -> None:
        self.awaited.set()
        assert self._past.wait(20)


class _Stream:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object] | None) -> None:
        self._queue.put(work)

    def wait_event(self, event: _Event) -> None:
        self.put(event.synchronize)

    def record_event(self) -> _Event:
        event = _Event()
        self.put(event.reached)
        return event

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class StandInDevice:
    """A device module with one user's stream; `hold` stops it until the gate it gives is set."""

    def __init__(self) -> None:
        self.users = _Stream()
        self._streams = [self.users]
        self._current = threading.local()
        self.copies = 0

    def Stream(self) -> _Stream:
        self._streams.append(_Stream())
        return self._streams[-1]

    def current_stream(self) -> _Stream:
        return getattr(self._current, "stream", self.users)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        self.current_stream().put(lambda: target.copy_(source))

    def copier(self) -> Copier:
        return Copier(self, None, copy=self.copy)

    def run(self, work: Callable[[], object]) -> None:
        """A kernel of the user."""
        self.users.put(work)

    def hold(self) -> threading.Event:
        gate = threading.Event()
        self.users.put(lambda: gate.wait(20))
        return gate

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.record_event().synchronize()

    def close(self) -> None:
        for stream in self._streams:
            stream.put(None)
