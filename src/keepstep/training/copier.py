"""Copies between the memory of a device and host memory, beside the user's stream and in its order.

Written against torch's device modules (`torch.cuda` and those with the same names). NOT RUN ON GPUs: tests run it
with a stand-in module whose streams are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch

from keepstep.errors import UsageError

__all__ = ["Copier", "DeviceModule", "Event", "StagingPool", "copier_of"]

_MOST_IDLE_BYTES = 1 << 30
_LEAST_BYTES = 1 << 12


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has come past it."""
        ...

    def synchronize(self) -> None:
        """Waits until it has."""
        ...


class DeviceModule(Protocol):
    """What is used of `torch.cuda`. A stream has `wait_event(event)` and `record_event() -> event`."""

    def Stream(self) -> Any:
        """A new stream on the current device."""
        ...

    def current_stream(self) -> Any:
        """The stream of the calling thread."""
        ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream`, and its device, the current ones of the calling thread."""
        ...


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class StagingPool:
    """Host buffers of powers of two, used again and again. `pin(nbytes)` makes one, as bytes. Thread-safe.

    A buffer given back with an event rests until the event is past. At most 1 GiB lies idle.
    """

    def __init__(self, pin: Callable[[int], torch.Tensor]) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._resting: list[tuple[torch.Tensor, Event]] = []
        self._idle_bytes = 0
        self.made = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes` bytes."""
        size = max(_LEAST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        with self._lock:
            self._collect()
            if self._idle.get(size):
                self._idle_bytes -= size
                return self._idle[size].pop()
            self.made += 1
        return self._pin(size)

    def give(self, buffers: Iterable[torch.Tensor], event: Event | None) -> None:
        """Takes buffers back; nobody touches them once `event` is past."""
        with self._lock:
            for buffer in buffers:
                if event is None:
                    self._keep(buffer)
                else:
                    self._resting.append((buffer, event))

    def _collect(self) -> None:
        resting, self._resting = self._resting, []
        for buffer, event in resting:
            if event.query():
                self._keep(buffer)
            else:
                self._resting.append((buffer, event))

    def _keep(self, buffer: torch.Tensor) -> None:
        if self._idle_bytes + buffer.numel() <= _MOST_IDLE_BYTES:
            self._idle.setdefault(buffer.numel(), []).append(buffer)
            self._idle_bytes += buffer.numel()


class Copier:
    """Side streams of one device, one for each direction and one for calls, and its pool of pinned buffers.

    `copy(target, source)` enqueues a copy on the current stream; `device` is None for a stand-in.
    """

    def __init__(
        self,
        module: DeviceModule,
        device: torch.device | None,
        *,
        copy: Callable[[torch.Tensor, torch.Tensor], None] = _copy,
    ) -> None:
        self._module, self._device, self._copy = module, device, copy
        self._down, self._up, self._calls = module.Stream(), module.Stream(), module.Stream()
        self.pool = StagingPool(self._pinned)

    def fork(self) -> Event:
        """Where the user's stream is now: both side streams go on behind it. For the caller's thread."""
        event: Event = self._module.current_stream().record_event()
        self._down.wait_event(event)
        self._up.wait_event(event)
        return event

    def fetch(self, host: torch.Tensor, tensor: torch.Tensor) -> Event:
        """Enqueues the copy of device `tensor` to `host`."""
        return self._enqueue(self._down, lambda: self._copy(host, tensor), tensor=tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> Event:
        """Enqueues the copy of `host` to device `tensor`."""
        return self._enqueue(self._up, lambda: self._copy(tensor, host), tensor=tensor)

    def zero(self, tensor: torch.Tensor) -> Event:
        """Enqueues zeros for device `tensor`."""
        return self._enqueue(self._up, lambda: self._copy(tensor, torch.zeros_like(tensor)), tensor=tensor)

    def join(self, event: Event) -> None:
        """Lets the caller's stream go on behind `event`."""
        self._module.current_stream().wait_event(event)

    def storing(self) -> AbstractContextManager[Any]:
        """A context in which the stream of `store` is the current one."""
        return self._module.stream(self._up)

    def launch(self, call: Callable[[Any], None], after: Callable[[], None]) -> Event:
        """Enqueues `call(stream)` and then `after()` behind the user's stream as it is now."""
        event: Event = self._module.current_stream().record_event()
        self._calls.wait_event(event)
        with self._module.stream(self._calls), torch.no_grad():
            call(self._calls)
            after()
        past: Event = self._calls.record_event()
        return past

    def launching(self) -> AbstractContextManager[Any]:
        """A context in which the stream of `launch` is the current one."""
        return self._module.stream(self._calls)

    def future(self) -> torch.futures.Future[object]:
        """A future that knows the streams of the device."""
        return torch.futures.Future(devices=[self._device] if self._device is not None else None)

    def _enqueue(self, stream: Any, work: Callable[[], None], *, tensor: torch.Tensor) -> Event:
        with self._module.stream(stream), torch.no_grad():
            work()
            if self._device is not None:
                tensor.record_stream(stream)
        event: Event = stream.record_event()
        return event

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device is not None)


@cache
def copier_of(device: torch.device) -> Copier:
    """The copier of a device. Raises UsageError for devices other than CUDA."""
    if device.type != "cuda":
        raise UsageError(
            f"the keepstep backend takes dense tensors on cpu and cuda, not on {device}",
            remedy="move the tensor to the CPU, or use another backend for this device",
        )
    with torch.cuda.device(device):
        return Copier(torch.cuda, device)  # type: ignore[arg-type]
