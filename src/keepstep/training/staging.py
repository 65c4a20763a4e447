"""Collectives of tensors on a device over the data plane, through pinned host memory. NOT RUN ON GPUs.

A call is handed over at once: its inputs are copied to the host beside the user's stream, a thread submits the call
when they are there, and its outputs are copied back when it is done. `wait` of such a work makes the user's stream wait
for that last copy. Large reductions and broadcasts are cut into pieces, so that copies and network overlap.
"""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from keepstep.errors import KeepstepError
from keepstep.training.copier import Copier, Event
from keepstep.training.plane import Call, Op, Plane, Status
from keepstep.training.tensor_calls import Prepared, check_dense
from keepstep.training.work import Completer, PlaneWork

__all__ = ["PIECE_BYTES", "StagedPrepared", "StagedWork", "Stager"]

PIECE_BYTES = 8 << 20
"""Size of the pieces that a large reduction or broadcast is cut into; equal on all members."""

_CUT = (Op.ALL_REDUCE, Op.REDUCE, Op.BROADCAST)
_Pair = tuple[torch.Tensor, torch.Tensor]


class StagedPrepared(Prepared):
    """As `Prepared`, for tensors on a device: what the plane sees are host buffers of the copier's pool."""

    __slots__ = ("_buffers", "_copier", "_done", "_downs", "_events", "_pieces", "_starts")

    def __init__(self, result: object, copier: Copier) -> None:
        super().__init__(result)
        self._copier = copier
        self._buffers: list[torch.Tensor] = []
        self._downs: list[_Pair] = []
        self._starts: list[int] = []
        self._events: list[Event] = []
        self._pieces: list[_Pair] = []
        self._done: Event | None = None

    def cut(self, calls: Sequence[Call], piece_bytes: int = PIECE_BYTES) -> Sequence[Call]:
        """`calls`, or the pieces of a single large call that may be cut. To be called before `start`."""
        if len(calls) != 1 or calls[0].op not in _CUT:
            return calls
        call = calls[0]
        address, nbytes = (*call.inputs, *call.outputs)[0]
        if max(len(call.inputs), len(call.outputs)) != 1 or nbytes < 2 * piece_bytes:
            return calls
        if not all(tensor.is_contiguous() for _, tensor in (*self._downs, *self._copies)):
            return calls
        spans = [(address + at, min(piece_bytes, nbytes - at)) for at in range(0, nbytes, piece_bytes)]
        self._pieces = [
            pair for tensor, host in self._copies for pair in _pieces(tensor, host, piece_bytes=piece_bytes)
        ]
        self._downs = [pair for host, tensor in self._downs for pair in _pieces(host, tensor, piece_bytes=piece_bytes)]
        return [
            replace(call, inputs=[span] if call.inputs else (), outputs=[span] if call.outputs else ())
            for span in spans
        ]

    def start(self) -> None:
        """Enqueues the copies of the inputs, behind what the user's stream was given before. In the caller's thread."""
        self._copier.fork()
        order = sorted(self._downs, key=lambda pair: pair[0].data_ptr())
        self._starts = [host.data_ptr() for host, _ in order]
        self._events = [self._copier.fetch(host, tensor) for host, tensor in order]

    def await_inputs(self, call: Call) -> None:
        """Waits until the inputs of `call` are on the host."""
        ends = [address + nbytes for address, nbytes in call.inputs if nbytes]
        last = max((bisect.bisect_left(self._starts, end) for end in ends), default=0)
        if last:
            self._events[last - 1].synchronize()  # the copies are made one after the other

    def arrived(self, number: int) -> None:
        """Call `number` is done: a piece of an output can go to the device."""
        if number < len(self._pieces):
            self._done = self._copier.store(*self._pieces[number])

    def finish(self) -> None:
        """All calls are done: enqueues what is left to be copied to the device."""
        if not self._pieces:
            for tensor, host in self._copies:
                self._done = self._copier.store(tensor, host)
        self._forget()

    def clamp(self) -> None:
        """As `Prepared.clamp`, on the device."""
        for tensor in self._integers:
            self._done = self._copier.zero(tensor)
        self._forget()

    def join(self) -> None:
        """Lets the caller's stream wait for the last copy to the device."""
        if self._done is not None:
            self._copier.join(self._done)

    def future(self) -> torch.futures.Future[object]:
        """A future that knows the streams of the device."""
        return self._copier.future()

    def delivering(self) -> AbstractContextManager[Any]:
        """Where the future is completed: on the stream of the copies to the device."""
        return self._copier.storing()

    def _dense(self, tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
        check_dense(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._copier.pool.take(nbytes)
        self._buffers.append(buffer)
        host = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        if copy:
            self._downs.append((host, tensor))
        return host

    def _forget(self) -> None:
        super()._forget()
        self._copier.pool.give(self._buffers, self._done or (self._events[-1] if self._events else None))
        self._buffers, self._downs, self._pieces = [], [], []


def _pieces(one: torch.Tensor, other: torch.Tensor, *, piece_bytes: int) -> list[_Pair]:
    """Two dense tensors of one size as pairs of pieces."""
    count = piece_bytes // one.element_size()
    return list(zip(one.view(-1).split(count), other.view(-1).split(count), strict=True))


class StagedWork(PlaneWork):
    """A work whose tickets come later, from the stager's thread."""

    def __init__(
        self,
        plane: Plane,
        prepared: StagedPrepared,
        *,
        blame: Callable[[Status, int], Exception | None],
        completer: Completer | None,
    ) -> None:
        super().__init__(plane, (), prepared=prepared, blame=blame, completer=completer)
        self._staged = prepared
        self._sent = threading.Event()

    def sent(self, tickets: Sequence[int], error: Exception | None = None) -> None:
        """The calls were submitted, or refused with `error`."""
        self._tickets = tickets
        if error is not None:
            with self._lock:
                self._error, self._settled = error, True
        self._sent.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the network, and lets the user's stream wait for the copies to the device."""
        super().wait(timeout)
        self._staged.join()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block the caller's thread."""
        return self._sent.is_set() and super().is_completed()

    def settle(self, limit_s: float | None = None) -> None:
        """As `PlaneWork.settle`, once there are tickets."""
        if not self._sent.wait(limit_s):
            error = self._blame(Status.PENDING, -1)
            if error is not None:
                raise error
            self._sent.wait()
        super().settle(limit_s)


class Stager:
    """Submits the calls of one group in order, each when its inputs are on the host; its thread starts when needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.Queue[tuple[StagedWork, StagedPrepared, Sequence[Call], Callable[[Call], int]] | None]
        self._queue = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit(
        self, work: StagedWork, prepared: StagedPrepared, *, calls: Sequence[Call], send: Callable[[Call], int]
    ) -> None:
        """Enqueues the copies and hands `calls` over; `send` submits one of them and gives its ticket."""
        prepared.start()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"keepstep-stage-{self._name}", daemon=True)
            self._thread.start()
        self._queue.put((work, prepared, calls, send))

    def flush(self) -> None:
        """Waits until all that was handed over is submitted: calls on other memory keep their turn."""
        if self._thread is not None:
            self._queue.join()

    def close(self) -> None:
        """Ends the thread once the queue is empty."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, prepared, calls, send = item
            tickets = []
            try:
                for call in calls:
                    prepared.await_inputs(call)
                    tickets.append(send(call))
                work.sent(tickets)
            except (KeepstepError, RuntimeError) as error:
                work.sent(tickets, error)
            self._queue.task_done()
            del item, work, prepared, calls, send
