"""The life of one simulated process: it runs a program, waits, freezes, wakes up, is killed. Knows nothing of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import msgspec

from keepstep.records.messages import Abort, Fact, Fence, Order, Stop
from keepstep.simulation.engine import Channel, Engine

__all__ = ["EXIT_FENCED", "Exit", "Life", "Pause", "Program"]

EXIT_FENCED = 76
_WIRE_S = 0.001


class Pause(msgspec.Struct, frozen=True):
    """A program stands at `point` until `ready()`."""

    point: str
    ready: Callable[[], bool]


class Exit(Exception):
    """A program ends itself with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


Program = Generator[Pause, None, None]


class Life:
    """One process. The world sets `at_point`, `on_exit` and `on_said`; a program sets `on_poison` and `on_move`."""

    def __init__(self, engine: Engine, name: str, *, node: str) -> None:
        self.name = name
        self.node = node
        self.alive = True
        self.frozen = False
        self.code = 0
        self.signal = 0
        self.said_hello = False
        self.published: dict[int, str] = {}
        self.at_point: Callable[[Life, str], None] = lambda life, point: None
        self.on_exit: Callable[[Life], None] = lambda life: None
        self.on_said: Callable[[Life, Fact], None] = lambda life, fact: None
        self.on_poison: Callable[[], None] = lambda: None
        self.on_move: Callable[[Order], bool] = lambda order: False
        self.orders: deque[Order] = deque()
        self._engine = engine
        self._epoch = 0
        self._program: Program | None = None
        self._pause: Pause | None = None
        self._running = False
        self._upward = Channel(engine, _WIRE_S)
        self._asleep: list[Callable[[], None]] = []

    # ------------------------------------------------------------ running

    def start(self, program: Program) -> None:
        """Begin to run `program`."""
        self._program = program
        self.resume()

    def resume(self) -> None:
        """Go on as far as possible. A frozen process goes on when it wakes up."""
        if self._running or self._program is None:
            return
        self._running = True
        while self.alive and not self.frozen and (self._pause is None or self._pause.ready()):
            self._pause = None
            self._advance(self._program)
        self._running = False
        if not self.alive:
            self._program = None

    def _advance(self, program: Program) -> None:
        try:
            pause = next(program)
        except StopIteration:
            self.end(0, 0)
        except Exit as leaving:
            self.end(leaving.code, 0)
        else:
            self._pause = pause
            self.at_point(self, pause.point)

    def sleep(self, seconds: float, point: str) -> Program:
        """A pause of `seconds` at `point`, for a program."""
        due = self._engine.now + seconds
        self._engine.at(seconds, self.resume)
        yield Pause(point, lambda: self._engine.now >= due)

    def wait(self, ready: Callable[[], bool], point: str) -> Program:
        """A pause at `point` until `ready()`, for a program."""
        yield Pause(point, ready)

    # ------------------------------------------------------------ talking

    def say(self, fact: Fact) -> None:
        """Send a fact to the agent; what was sent arrives even if the process dies then."""
        self._upward.send(lambda: self.on_said(self, fact))

    def take_order(self, order: Order) -> None:
        """What the reading thread of `training.agent_link` does: some orders do not wait for the training loop."""
        if not self.alive:
            return
        if self.frozen:
            self._asleep.append(lambda: self.take_order(order))
            return
        epoch = getattr(order, "epoch", 0)
        if epoch < self._epoch:
            return
        self._epoch = epoch
        if isinstance(order, Fence):
            self.end(EXIT_FENCED, 0)
            return
        if self.on_move(order):
            return
        self.orders.append(order)
        if isinstance(order, (Abort, Stop)):
            self.on_poison()
        self.resume()

    def when_awake(self, action: Callable[[], None]) -> None:
        """Do `action` now, or when the process wakes up; never if it is dead."""
        if self.alive and self.frozen:
            self._asleep.append(action)
        elif self.alive:
            action()

    # ------------------------------------------------------------ ending

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def wake(self) -> None:
        """SIGCONT: whatever waited happens now, in order."""
        self.frozen = False
        waited, self._asleep = self._asleep, []
        for action in waited:
            if self.alive:
                self.when_awake(action)
        self.resume()

    def end(self, code: int, signal: int) -> None:
        """The process is gone."""
        if self.alive:
            self.alive = False
            self.code, self.signal = code, signal
            self.on_exit(self)
