"""Drills inside a training process: orders come from the agent, faults begin and end at step boundaries.

Where no drill was ever ordered nothing of this runs. The end of a fault is taken at once, in the thread that reads
orders, because a drilled process may hang.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from keepstep.records.messages import Drill, Drilled
from keepstep.training.injected import (
    BusyGil,
    Fault,
    FlipBit,
    Mismatch,
    SlowCompute,
    SlowData,
    SlowLinks,
    StopData,
    Wires,
)
from keepstep.training.injected_state import CorruptCheckpoint, StateWire, ThrottleState
from keepstep.training.pace import Pace
from keepstep.training.plane import Call

__all__ = ["Clock", "Injector"]

_log = logging.getLogger("keepstep")
_ONCE = frozenset({"mismatch", "flip-bit", "corrupt-checkpoint"})
_PAST = frozenset({"flip-bit", "corrupt-checkpoint"})
"""What is done and over at once."""


class Clock(Protocol):
    """Where the time comes from; the recorder is one."""

    def wall_s(self) -> float:
        """Seconds since 1970."""

    def monotonic_s(self) -> float:
        """Seconds of a clock that only goes forward."""


@dataclass
class _Active:
    """A fault that was begun in `step`, or is about to be (`note` None)."""

    order: Drill
    fault: Fault
    note: str | None = None
    step: int = -1


class Injector:
    """The drills of one process.

    `pace` is set while a drill is under way: then collectives and batches tell it when computing stops and goes on.
    """

    def __init__(
        self,
        wires: Wires,
        *,
        clock: Clock,
        report: Callable[[Drilled], None],
        modules: Callable[[], Sequence[torch.nn.Module]],
    ) -> None:
        """`report` gets every fault as it begins and ends; `modules()` are the tracked ones.

        `checkpoints` is where they are written and `state_wire` what serves the state, once that is known.
        """
        self.pace: Pace | None = None
        self.checkpoints: Path | None = None
        self.state_wire: StateWire | None = None
        self._wires = wires
        self._clock = clock
        self._report = report
        self._modules = modules
        self._lock = threading.RLock()
        self._armed: list[Drill] = []
        self._active: list[_Active] = []
        self._step = -1

    def order(self, order: Drill) -> None:
        """Take an order: a fault waits for its step, the end of one happens now. Any thread."""
        with self._lock:
            if not order.stop:
                self._armed.append(order)
                return
            over = _ended_by(order, [*self._armed, *(one.order for one in self._active)])
            self._armed = [other for other in self._armed if other not in over]
            ended = [one for one in self._active if one.order in over]
            for one in ended:
                self._end(one)
            if not ended:
                self._tell(order, note="there was none", ended=True)

    def begin_step(self, step: int) -> None:
        """Step `step` is about to begin: end what is over, begin what is due."""
        self._step = step
        if not self._armed and not self._active:
            self.pace = None
            return
        with self._lock:
            if self.pace is None:
                self.pace = Pace(self._clock.monotonic_s)
            else:
                self.pace.begin_step()
            for one in [one for one in self._active if _is_over(one, step)]:
                self._end(one)
            due = [order for order in self._armed if order.step <= step]
            self._armed = [order for order in self._armed if order.step > step]
            self._active += [_Active(order, self._fault(order, self.pace)) for order in due]
            for one in [one for one in self._active if one.note is None]:
                self._begin(one, step)
            if not self._armed and not self._active:
                self.pace = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for others, which is no computing."""
        pace = self.pace
        if pace is not None:
            pace.pause()
        try:
            yield
        finally:
            if pace is not None:
                pace.resume()

    def take(self, iterator: Iterator[Any]) -> Any:
        """`next(iterator)`, behind the faults of the loader."""
        pace = self.pace
        if pace is None:
            return next(iterator)
        pace.defer()
        try:
            for one in tuple(self._active):
                if isinstance(one.fault, SlowData | StopData) and one.note is not None:
                    one.fault.hold()
            return next(iterator)
        finally:
            pace.resume()

    def altered(self, calls: Sequence[Call], *, rank: int) -> Sequence[Call]:
        """What a process group submits in place of `calls`; `rank` is the group rank."""
        for one in tuple(self._active):
            if isinstance(one.fault, Mismatch):
                return one.fault.altered(calls, rank=rank)
        return calls

    def _fault(self, order: Drill, pace: Pace) -> Fault:
        makers: dict[str, Callable[[], Fault]] = {
            "slow-compute": lambda: SlowCompute(pace, order.factor),
            "busy-gil": lambda: BusyGil(order.factor),
            "slow-data": lambda: SlowData(pace, order.factor),
            "stop-data": StopData,
            "mismatch": lambda: Mismatch(order.how),
            "flip-bit": lambda: FlipBit(self._modules),
            "corrupt-checkpoint": lambda: CorruptCheckpoint(lambda: self.checkpoints, order.rank),
            "throttle-state": lambda: ThrottleState(
                self.state_wire, rate=order.rate, factor=order.factor, now=self._clock.monotonic_s
            ),
        }
        links = SlowLinks(self._wires, order.peers, rate=order.rate, factor=order.factor, now=self._clock.monotonic_s)
        return makers.get(order.fault, lambda: links)()

    def _begin(self, one: _Active, step: int) -> None:
        one.note = one.fault.begin(step)
        if one.note is None:
            return
        one.step = step
        self._tell(one.order, note=one.note, ended=False)
        if one.order.fault in _PAST:
            self._active.remove(one)

    def _end(self, one: _Active) -> None:
        one.fault.end()
        self._active.remove(one)
        if one.order.fault not in _ONCE:
            self._tell(one.order, note=one.note or "", ended=True)

    def _tell(self, order: Drill, *, note: str, ended: bool) -> None:
        step = self._step
        _log.info("drill: %s%s in step %d (%s)", "end of " if ended else "", order.fault, step, note)
        self._report(Drilled(order.fault, order.rank, step, self._clock.wall_s(), ended=ended, note=note))


def _is_over(one: _Active, step: int) -> bool:
    """A mismatch is over after its step, others after as many as were ordered."""
    if one.note is None:
        return False
    steps = 1 if one.order.fault in _ONCE else one.order.steps
    return bool(steps) and step >= one.step + steps


def _ended_by(stop: Drill, given: Sequence[Drill]) -> list[Drill]:
    """What `stop` ends: the fault with the same peers, else with some of them, if ranks have moved since it began."""
    alike = [one for one in given if one.fault == stop.fault]
    return [one for one in alike if one.peers == stop.peers] or [
        one for one in alike if not set(one.peers).isdisjoint(stop.peers)
    ]
