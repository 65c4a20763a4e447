"""The member's line to its agent: facts go up, orders come down through one reading thread.

The thread only does what must not wait for the training loop: an abort poisons the fabric at once, a fenced member
exits at once. All other orders wait in a queue until the training loop stands where it may answer.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable

from keepstep.errors import PeerLost
from keepstep.records.messages import Abort, Drill, Fact, Fence, Order, Stop, TakePaths
from keepstep.records.mirror_messages import PlaceMirror
from keepstep.records.move_messages import MoveOrder, ReleaseMember
from keepstep.records.sandbox_messages import KeepRecording
from keepstep.records.watch_messages import ProbeLinks
from keepstep.store.wire import MemberWire

__all__ = ["EXIT_AGENT_LOST", "EXIT_FENCED", "AgentLink"]

EXIT_FENCED = 76
EXIT_AGENT_LOST = 75


class AgentLink:
    """Orders for this process, in order; `on_abort`, `on_paths`, `on_move` and `on_probe` run in the reading thread.

    `place` is the newest word on who holds this member's mirror.
    """

    def __init__(self, wire: MemberWire, *, member: str) -> None:
        self.member = member
        self.on_abort: Callable[[Order], None] | None = None
        self.on_paths: Callable[[TakePaths], None] | None = None
        self.on_move: Callable[[MoveOrder], None] | None = None
        self.on_probe: Callable[[ProbeLinks], None] | None = None
        self.place: PlaceMirror | None = None
        self.on_recording: Callable[[KeepRecording], None] | None = None
        self._wire = wire
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._drills = threading.Lock()
        self._early: list[Drill] = []
        self._on_drill: Callable[[Drill], None] = self._early.append
        self._epoch = 0
        self._closing = False
        self._thread = threading.Thread(target=self._read, name="keepstep-orders", daemon=True)

    def start(self) -> None:
        """Begin to read orders."""
        self._thread.start()

    def say(self, fact: Fact) -> None:
        """Send a fact up. Raises PeerLost if the agent is gone."""
        self._wire.send(fact)

    def pending(self) -> bool:
        """True if an order waits."""
        return not self._orders.empty()

    def next_order(self, timeout_s: float | None = None) -> Order | None:
        """The next order; None after `timeout_s` seconds without one, and where `wake` was called."""
        try:
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Let `next_order` return without an order; from any thread."""
        self._orders.put(None)

    def take_drills(self, handler: Callable[[Drill], None]) -> None:
        """Give drills to `handler` from now on, in the reading thread; those that came already, here."""
        with self._drills:
            self._on_drill = handler
            for order in self._early:
                handler(order)
            self._early.clear()

    def close(self) -> None:
        """Hang up; the agent sees an orderly end."""
        self._closing = True
        self._wire.close()

    def _read(self) -> None:
        while True:
            try:
                order = self._wire.receive()
            except PeerLost:
                if not self._closing:
                    _leave(EXIT_AGENT_LOST, "the agent of this node is gone")
                return
            if not isinstance(order, Order) or order.epoch < self._epoch:
                continue
            self._epoch = order.epoch
            if isinstance(order, Drill):
                with self._drills:
                    self._on_drill(order)
                continue
            if isinstance(order, ProbeLinks):
                if self.on_probe is not None:
                    self.on_probe(order)
                continue
            if isinstance(order, TakePaths):
                if self.on_paths is not None:
                    self.on_paths(order)
                continue
            if isinstance(order, MoveOrder) and not isinstance(order, ReleaseMember):
                if self.on_move is not None:
                    self.on_move(order)
                continue
            if isinstance(order, PlaceMirror):
                self.place = order
                continue
            if isinstance(order, KeepRecording):
                if self.on_recording is not None:
                    self.on_recording(order)
                continue
            if isinstance(order, Fence):
                _leave(EXIT_FENCED, order.why)
            self._orders.put(order)  # before the poison: whoever clears it must find the order
            if isinstance(order, (Abort, Stop)) and self.on_abort is not None:
                self.on_abort(order)


def _leave(code: int, why: str) -> None:
    """End this process without running anything of the user's: it must change nothing any more."""
    sys.stderr.write(f"keepstep: this process ends: {why}\n")
    sys.stderr.flush()
    os._exit(code)
