"""The faults that a training process can inject into itself, one class each.

Each is begun at the start of a step until it says what it did, and ended from whatever thread hears of the end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from keepstep.training.pace import Pace
from keepstep.training.plane import Call, Element, Op
from keepstep.training.sharding import local_of

__all__ = ["BusyGil", "Fault", "FlipBit", "Mismatch", "SlowCompute", "SlowData", "SlowLinks", "StopData", "Wires"]

_HOLD_S = 0.02
_COUNTED_STEPS = 3
_SCRATCH_ELEMENT = Element.FLOAT32
_FLIPPED_BIT = 20
"""Of a float32: the fourth highest of the mantissa, so that the number changes by a few percent and stays finite."""


class Fault(Protocol):
    """One fault of this process."""

    def begin(self, step: int) -> str | None:
        """Inject it in `step`. What was done in numbers ("": nothing to say); None: not yet, ask again next step."""

    def end(self) -> None:
        """Take it away. Any thread."""


class Wires(Protocol):
    """The links of this process; the fabric is one."""

    def limit(self, rank: int, bytes_per_s: float | None) -> None:
        """All bytes to `rank` pass a wire of `bytes_per_s`: 0 cut, negative only counted, None as ever."""

    def limited_bytes(self, rank: int) -> int:
        """Bytes to `rank` since the limit began."""


class SlowCompute:
    """Computing takes `factor` times as long."""

    def __init__(self, pace: Pace, factor: float) -> None:
        self._pace = pace
        self._factor = factor

    def begin(self, step: int) -> str | None:
        """From now on."""
        self._pace.factor = self._factor
        return ""

    def end(self) -> None:
        """As before."""
        self._pace.factor = 1.0


class BusyGil:
    """A thread holds Python's lock (factor - 1) / factor of the time; it sleeps, so that peers keep the processor."""

    def __init__(self, factor: float) -> None:
        self._free_s = _HOLD_S / (factor - 1.0)
        self._over = threading.Event()

    def begin(self, step: int) -> str | None:
        """Starts the thread."""
        threading.Thread(target=self._hold, name="drill-busy-gil", daemon=True).start()
        return f"{_HOLD_S * 1e3:g} ms held, {self._free_s * 1e3:.3g} ms free"

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()

    def _hold(self) -> None:
        usleep = ctypes.PyDLL(None).usleep  # unlike CDLL it keeps the lock during the call
        while not self._over.is_set():
            usleep(int(_HOLD_S * 1e6))
            time.sleep(self._free_s)


class SlowData:
    """Every step waits for its batch so long that it takes `factor` times as long as it computes."""

    def __init__(self, pace: Pace, factor: float) -> None:
        self.delay_s = 0.0
        self._pace = pace
        self._factor = factor

    def begin(self, step: int) -> str | None:
        """As soon as one whole step was measured."""
        if self._pace.step_s <= 0:
            return None
        self.delay_s = self._pace.step_s * (self._factor - 1.0)
        return f"{self.delay_s * 1e3:.3g} ms a batch"

    def end(self) -> None:
        """As before."""
        self.delay_s = 0.0

    def hold(self) -> None:
        """In the loader's place."""
        time.sleep(self.delay_s)


class StopData:
    """The loader gives nothing until the drill ends."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def begin(self, step: int) -> str | None:
        """From now on."""
        self._open.clear()
        return ""

    def end(self) -> None:
        """Whoever waits goes on."""
        self._open.set()

    def hold(self) -> None:
        """In the loader's place."""
        self._open.wait()


class SlowLinks:
    """The links to `peers` have `rate` bytes/s (0: they are cut).

    With `factor` the rate is found first, from what three steps send: what one step sends is then on the wire so long
    that a step takes `factor` times as long, where nothing else hides it.
    """

    def __init__(
        self, wires: Wires, peers: Sequence[int], *, rate: float, factor: float, now: Callable[[], float]
    ) -> None:
        self._wires = wires
        self._peers = peers
        self._rate = rate
        self._factor = factor
        self._now = now
        self._counting = -1
        self._since = 0.0

    def begin(self, step: int) -> str | None:
        """At once with a rate; with a factor after the counted steps."""
        if self._factor:
            if self._counting < 0:
                self._count(step)
                return None
            if step < self._counting + _COUNTED_STEPS:
                return None
            return self._slow_down(step)
        self._set(self._rate)
        return f"{self._rate:g} bytes/s" if self._rate else "nothing passes"

    def end(self) -> None:
        """As before."""
        for peer in self._peers:
            self._wires.limit(peer, None)

    def _set(self, rate: float) -> None:
        for peer in self._peers:
            self._wires.limit(peer, rate)

    def _count(self, step: int) -> None:
        self._counting, self._since = step, self._now()
        self._set(-1.0)

    def _slow_down(self, step: int) -> str | None:
        """The slowest peer's rate for all: the one to which most was sent. Nothing sent at all: count on."""
        steps = step - self._counting
        sent = max(self._wires.limited_bytes(peer) for peer in self._peers) / steps
        if not sent:
            return None
        rate = sent / ((self._factor - 1.0) * (self._now() - self._since) / steps)
        self._set(rate)
        return f"{rate:.4g} bytes/s, {sent:.4g} bytes a step"


class FlipBit:
    """One bit of the first weight of this rank is flipped."""

    def __init__(self, modules: Callable[[], Sequence[torch.nn.Module]]) -> None:
        self._modules = modules

    def begin(self, step: int) -> str | None:
        """At once, where the rank has any weight; else never."""
        for module in self._modules():
            for name, parameter in module.named_parameters():
                local = local_of(parameter.detach())
                if local.numel():
                    _flip(local)
                    return f"bit {_FLIPPED_BIT} of element 0 of {name}"
        return None

    def end(self) -> None:
        """It stays flipped."""


def _flip(tensor: torch.Tensor) -> None:
    """Flips one bit of the first element in place."""
    first = tensor.reshape(-1)[:1] if tensor.is_contiguous() else tensor[tuple([slice(0, 1)] * tensor.dim())]
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bit = _FLIPPED_BIT % (8 * tensor.element_size() - 2)
    first.copy_((first.reshape(1).view(width) ^ (1 << bit)).view(tensor.dtype).reshape(first.shape))


class Mismatch:
    """The next collective of this rank is another one than the others call; `how` as in records.drills.MISMATCHES."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._armed = False
        self._scratch: list[torch.Tensor] = []

    def begin(self, step: int) -> str | None:
        """The next collective is altered."""
        self._armed = True
        return self._how

    def end(self) -> None:
        """Nothing is altered any more."""
        self._armed = False

    def altered(self, calls: Sequence[Call], *, rank: int) -> Sequence[Call]:
        """What this rank calls in place of `calls`; `rank` is its group rank. Messages between two ranks stay."""
        if not self._armed or not calls or calls[0].op >= Op.SEND:
            return calls
        self._armed = False
        first = calls[0]
        if self._how == "extra":
            return [self._small_all_reduce(), *calls]
        if self._how == "shape":
            return [self._longer(first), *calls[1:]]
        other = self._broadcast(first, rank) if first.op == Op.ALL_REDUCE else self._small_all_reduce()
        return [other, *calls[1:]]

    def _span(self, nbytes: int) -> tuple[int, int]:
        self._scratch.append(torch.zeros(max(nbytes, 8), dtype=torch.uint8))
        return self._scratch[-1].data_ptr(), nbytes

    def _small_all_reduce(self) -> Call:
        span = self._span(_SCRATCH_ELEMENT.nbytes)
        return Call(Op.ALL_REDUCE, _SCRATCH_ELEMENT, inputs=[span], outputs=[span])

    def _broadcast(self, call: Call, rank: int) -> Call:
        buffers = [self._span(nbytes) for _, nbytes in call.inputs]
        if rank == 0:
            return Call(Op.BROADCAST, call.element, inputs=buffers)
        return Call(Op.BROADCAST, call.element, outputs=buffers)

    def _longer(self, call: Call) -> Call:
        """The same call with one element more in every buffer; buffers used twice stay so."""
        places = {
            address: self._span(nbytes + call.element.nbytes) for address, nbytes in (*call.inputs, *call.outputs)
        }
        return Call(
            call.op,
            call.element,
            call.reduction,
            root=call.root,
            inputs=[places[address] for address, _ in call.inputs],
            outputs=[places[address] for address, _ in call.outputs],
        )
