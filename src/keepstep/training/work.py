"""What a collective returns: `Work` objects whose waiting happens in C, and the thread that completes futures.

C++ callers of torch see only `wait` and `get_future` of these; the future's value is a list of tensors. A call's
tensors are kept alive until it is finished.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from keepstep.errors import TransportError
from keepstep.training.failed_future import fail
from keepstep.training.pace import Pace
from keepstep.training.plane import Plane, Status
from keepstep.training.tensor_calls import Prepared

__all__ = ["Completer", "DoneWork", "PlaneWork"]

_MOST_THREADS = 32


class DoneWork(Work):  # type: ignore[misc]
    """A collective that was answered at once."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[object] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True: there is nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """Nothing to do."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> None:
        """None."""

    def result(self) -> object:
        """The tensors of the call."""
        return self._result

    def source_rank(self) -> int:
        """0: a local answer has no source."""
        return 0

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[object]:
        """A completed future."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._result)
        return self._future


class Completer:
    """Completes the futures of one process group in order.

    A callback of a future may itself wait for a later future of the group (PowerSGD does): whenever all threads of
    the completer are inside callbacks, one more is started, at most 32.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[PlaneWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free = 0

    def follow(self, work: PlaneWork) -> None:
        """Has the future of `work` completed when the work is."""
        self._queue.put(work)
        self._grow()

    def close(self) -> None:
        """Ends the threads once the queue is empty."""
        with self._lock:
            for _ in range(self._threads):
                self._queue.put(None)
            self._threads, self._free = _MOST_THREADS, 1

    def _grow(self) -> None:
        with self._lock:
            if self._free or self._threads >= _MOST_THREADS:
                return
            self._threads += 1
            self._free += 1
            threading.Thread(target=self._run, name=f"keepstep-future-{self._name}", daemon=True).start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.settle()
            with self._lock:
                self._free -= 1
            if not self._queue.empty():
                self._grow()
            work.complete_future()
            del work
            with self._lock:
                self._free += 1


def _waited(plane: Plane, ticket: int, *, limit_s: float | None) -> Status:
    """The status of a ticket after waiting for it; a plane that was closed has aborted all of its calls."""
    try:
        return plane.wait(ticket, limit_s)
    except TransportError:
        return Status.ABORTED


class PlaneWork(Work):  # type: ignore[misc]
    """One collective on a plane (one ticket, or several for a coalesced one).

    `blame(status, ticket)` turns an abort or a failure into the exception to raise, or None where nothing may raise;
    then integer outputs are zeroed, so that sizes read from them are harmless. `pace`, if set, is told of waiting.
    """

    def __init__(
        self,
        plane: Plane,
        tickets: Sequence[int],
        *,
        prepared: Prepared,
        blame: Callable[[Status, int], Exception | None],
        completer: Completer | None,
    ) -> None:
        super().__init__()
        self.pace: Pace | None = None
        self._plane = plane
        self._tickets = tickets
        self._prepared = prepared
        self._blame = blame
        self._completer = completer
        self._lock = threading.Lock()
        self._waiting = self._told = 0
        self._settled = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[object] | None = None
        self._source = -1

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits, at most `timeout` if it is positive. Raises DistBackendError if the collective did not succeed."""
        if not self._settled:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            if self.pace is not None:
                self.pace.pause()
            self.settle(limit_s if limit_s > 0 else None)
            if self.pace is not None:
                self.pace.resume()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self._settled:
            return True
        try:
            return all(self._plane.done(ticket) for ticket in self._tickets)
        except TransportError:  # the plane was closed: there is nothing to wait for
            return True

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        if not self.is_completed():
            return False
        self.settle()
        return self._error is None

    def exception(self) -> Exception | None:
        """The error it ended with."""
        return self._error

    def result(self) -> object:
        """The tensors of the call."""
        return self._prepared.result

    def source_rank(self) -> int:
        """Group rank a received message came from (-1: not a finished receive)."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[object]:
        """A future with the list of tensors; completed by the completer's thread."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = self._prepared.future()
        if self._completer is None and not self._settled:
            threading.Thread(target=self._complete_alone, name="keepstep-future", daemon=True).start()
        elif self._completer is None or self._settled:
            self.complete_future()
        else:
            self._completer.follow(self)
        return self._future

    def settle(self, limit_s: float | None = None) -> None:
        """Waits for the tickets and does once what follows: copies, or the error. Raises the error of `limit_s`."""
        with self._lock:
            if self._settled:
                return
            self._waiting += 1
        worst, culprit = Status.DONE, self._tickets[-1] if self._tickets else -1
        for number, ticket in enumerate(self._tickets):
            status = _waited(self._plane, ticket, limit_s=limit_s)
            if status is not Status.DONE:
                worst, culprit = status, ticket
                break
            self._arrived(number)
        with self._lock:
            self._waiting -= 1
            late = worst is Status.PENDING
            if not self._settled and not late:
                self._conclude(worst, culprit)
                self._settled = True
            if self._settled and self._waiting == 0:
                self._release()
        if late and not self._settled:
            error = self._blame(Status.PENDING, culprit)
            if error is not None:
                raise error

    def complete_future(self) -> None:
        """Gives the settled outcome to the future."""
        assert self._future is not None
        if self.pace is not None:
            self.pace.resume()
        with self._prepared.delivering():
            if self._error is not None:
                fail(self._future, self._error)
            else:
                self._future.set_result(self._prepared.result)

    def _arrived(self, number: int) -> None:
        """Each call that is done is told once, in order, however many threads wait."""
        with self._lock:
            if number == self._told and not self._settled:
                self._told += 1
                self._prepared.arrived(number)

    def _complete_alone(self) -> None:
        self.settle()
        self.complete_future()

    def _conclude(self, status: Status, ticket: int) -> None:
        if status is Status.DONE:
            self._prepared.finish()
            if self._prepared.from_any:
                self._source = self._plane.source(ticket)
            return
        self._error = self._blame(status, ticket)
        if self._error is None:
            self._prepared.clamp()

    def _release(self) -> None:
        tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            self._plane.release(ticket)
