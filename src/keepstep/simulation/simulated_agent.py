"""A twin of the agent of one node: starts and ends processes, sees exits and freezes, passes everything on."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.control.job_state import Directed
from keepstep.records.messages import (
    Fact,
    KillMember,
    MemberExited,
    MemberStarted,
    MemberStopped,
    StartFailed,
    StartMember,
)
from keepstep.simulation.engine import Channel, Engine
from keepstep.simulation.simulated_process import Life

__all__ = ["SimulatedAgent"]

_WIRE_S = 0.001
_FROZEN_S = 0.3
_SIGTERM, _SIGKILL = 15, 9


class SimulatedAgent:
    """`spawn(life, order)` runs a program in a new process; `upward(member, fact)` reaches the controller.

    The process named `broken` cannot be started.
    """

    def __init__(
        self,
        engine: Engine,
        node: str,
        *,
        spawn: Callable[[Life, StartMember], None],
        upward: Callable[[str, Fact], None],
        broken: str,
    ) -> None:
        self.node = node
        self._broken = broken
        self.lives: dict[str, Life] = {}
        self._engine = engine
        self._spawn = spawn
        self._upward = upward
        self._lines: dict[str, Channel] = {}

    def obey(self, directed: Directed) -> None:
        """Carry out an order or pass it on to a member."""
        order = directed.order
        if isinstance(order, StartMember):
            self._start(order)
        elif isinstance(order, KillMember):
            self._end(order)
        elif directed.member in self.lives:
            life = self.lives[directed.member]
            self._lines[life.name].send(lambda: life.take_order(order))

    def _start(self, order: StartMember) -> None:
        if order.member == self._broken:
            self._upward("", StartFailed(order.member, order.rank, "no such file"))
            return
        life = Life(self._engine, order.member, node=self.node)
        self.lives[life.name] = life
        self._lines[life.name] = Channel(self._engine, _WIRE_S)
        life.on_said = lambda life, fact: self._upward(life.name, fact)
        life.on_exit = self._exited
        self._upward("", MemberStarted(order.member, order.rank, self.node, 1))
        self._spawn(life, order)

    def _exited(self, life: Life) -> None:
        """The exit is noticed a moment later, before or after the last words have been read."""
        private = {version: text.encode() for version, text in life.published.items()}
        onset = self._engine.now - 0.001
        fact = MemberExited(life.name, -1, life.code, life.signal, private, onset, protected=life.said_hello)
        self._engine.at(self._engine.delay(_WIRE_S), lambda: self._upward(life.name, fact))

    def _end(self, order: KillMember) -> None:
        life = self.lives.get(order.member)
        if life is not None:
            self._engine.at(self._engine.delay(_WIRE_S), lambda: life.when_awake(lambda: life.end(-15, _SIGTERM)))
            self._engine.at(order.grace_s, lambda: life.end(-9, _SIGKILL))

    def watch_frozen(self, life: Life) -> None:
        """A process has just been frozen: say so if it still is when that is sure."""
        since = self._engine.now

        def look() -> None:
            if life.alive and life.frozen:
                private = {version: text.encode() for version, text in life.published.items()}
                self._upward(life.name, MemberStopped(life.name, -1, since, private, since))

        self._engine.at(_FROZEN_S, look)
