"""Calls that run on device memory itself, and the works they return. NOT RUN ON GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from keepstep.training.copier import Copier, Event
from keepstep.training.failed_future import fail
from keepstep.training.tensor_calls import Prepared, check_dense

__all__ = ["Blame", "DirectPrepared", "DirectWork"]

Blame = Callable[[], Exception | None]
"""The error of a call that a loss cut, or None where it must not raise."""


class DirectPrepared(Prepared):
    """As `Prepared`, with addresses on the device of `copier`."""

    def __init__(self, result: object, copier: Copier) -> None:
        super().__init__(result)
        self.copier = copier

    def copy_back(self) -> None:
        """Behind the call, on its stream: results into outputs that are not dense."""
        for tensor, dense in self._copies:
            tensor.copy_(dense, non_blocking=True)

    @property
    def has_integers(self) -> bool:
        """Whether an output holds whole numbers, which may be sizes."""
        return bool(self._integers)

    def _dense(self, tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
        check_dense(tensor)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        with torch.no_grad():
            if copy:
                return tensor.resolve_conj().resolve_neg().contiguous()
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class DirectWork(Work):  # type: ignore[misc]
    """One call that was enqueued; `event` is None where a loss came before. `cut` is set where a loss may have ended
    it; while `exposed()` it is waited for and raises what `blame` gives."""

    def __init__(
        self, prepared: DirectPrepared, event: Event | None, *, exposed: Callable[[], bool], blame: Blame
    ) -> None:
        super().__init__()
        self._prepared, self._event, self._copier = prepared, event, prepared.copier
        self._exposed, self._blame = exposed, blame
        self.cut = event is None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[object] | None = None
        self._concluded = False
        self._error: Exception | None = None

    def past(self) -> bool:
        """Whether the device is done with it."""
        return self._event is None or self._event.query()

    def await_device(self) -> None:
        """Waits until the device is done with it, or it was ended."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Lets the caller's stream wait for the call. Outputs of whole numbers are waited for here: if a loss ends the
        call they are zeroed, so that sizes read from them are harmless. Between two steps every call is waited for, and
        one that a loss cut raises GroupAborted."""
        if self._prepared.has_integers or self._exposed():
            self.await_device()
        if self._event is not None:
            self._copier.join(self._event)
        self._conclude()
        if self._error is not None:
            raise self._error
        return True

    def _conclude(self) -> None:
        """Once for a call that was cut: its error, or zeros."""
        with self._lock:
            first = self.cut and not self._concluded
            self._concluded = self._concluded or first
        if first:
            self._error = self._blame()
            if self._error is None:
                self._prepared.clamp()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return self.past()

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return self.past() and self._error is None

    def exception(self) -> Exception | None:
        """The error that `wait` raised."""
        return self._error

    def result(self) -> object:
        """The tensors of the call."""
        return self._prepared.result

    def get_future(self) -> torch.futures.Future[object]:
        """A future with the list of tensors, completed at once on the call's stream. Between two steps the device is
        waited for: the future may hold the error of a call that a loss cut."""
        if self._exposed():
            self.await_device()
            self._conclude()
        with self._lock:
            if self._future is None:
                self._future = self._copier.future()
                with self._copier.launching():
                    if self._error is not None:
                        fail(self._future, self._error)
                    else:
                        self._future.set_result(self._prepared.result)
            return self._future
