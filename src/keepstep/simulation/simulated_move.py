"""What a training process does for a planned move: beside its loop, and at the boundary where the move is committed.

Twins of `training`: preparing takes a while and may fail, the vote is a collective, the last update reaches the joiner
a moment after the leaver has said that it committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from keepstep.control.member import MemberState
from keepstep.control.member_moves import hand_over, may_take_over, stay, take_over
from keepstep.records.messages import Order
from keepstep.records.move_messages import (
    CancelMove,
    CommitMove,
    MovePrepared,
    MoveRefused,
    MoveTaken,
    PrepareMove,
)
from keepstep.simulation.engine import Engine
from keepstep.simulation.simulated_plane import SimulatedFabric
from keepstep.simulation.simulated_process import Life, Program

__all__ = ["Habits", "Mover", "MovingPart"]

_LINK_S = 0.01
_COPY_S = 0.03


class Habits(msgspec.Struct, frozen=True):
    """How likely a member cannot prepare, says no in a vote, or is linked with a leaver."""

    cannot: float = 0.0
    refuses: float = 0.0
    linked: float = 1.0


class Mover(Protocol):
    """A trainee, as its part in moves sees it."""

    rank: int
    state: str
    private: str
    life: Life
    fabric: SimulatedFabric
    machine: MemberState

    def took_over(self) -> None:
        """Its state is that of the job from now on."""


class MovingPart:
    """One trainee's part. `others` are all trainees by name; `record` is what the leaver handed over."""

    def __init__(self, engine: Engine, mover: Mover, *, others: Callable[[str], MovingPart], habits: Habits) -> None:
        self.mover = mover
        self.order: PrepareMove | None = None
        self.record: tuple[int, str, str] | None = None
        self._commit = False
        self._failed = 0
        self._engine = engine
        self._others = others
        self._habits = habits

    # ------------------------------------------------------------ beside the loop

    def take(self, order: Order) -> bool:
        """What the reading thread does with an order about a move; False if it is for the loop."""
        if isinstance(order, PrepareMove):
            self.order, self._commit, self._failed = order, False, 0
            mean_s = {"leave": _LINK_S, "stay": _LINK_S, "join": _COPY_S}[order.part]
            self._engine.at(self._engine.delay(mean_s), lambda: self.mover.life.when_awake(lambda: self._ready(order)))
        elif isinstance(order, CommitMove):
            known = self.order is not None and self.order.number == order.number
            self._commit = known and order.failed >= self._failed
        elif isinstance(order, CancelMove):
            if self.order is not None and self.order.number == order.number:
                self.clear()
        else:
            return False
        return True

    def clear(self) -> None:
        """Drop what was prepared."""
        self.order, self.record, self._commit = None, None, False

    def _ready(self, order: PrepareMove) -> None:
        """Prepared, or not."""
        if self.order is not order:
            return
        rng, roster = self._engine.rng, self.mover.fabric.roster
        calls = [order.leaver.member] if order.leaver is not None else [a.member for a in order.ranks.values()]
        deaf = order.part != "leave" and not all(self._others(name).mover.life.alive for name in calls)
        if deaf or rng.random() < self._habits.cannot:
            self.mover.life.say(MovePrepared(order.number, why="nobody answers" if deaf else "no memory"))
            return
        peers = tuple(r for r in roster if r != self.mover.rank and rng.random() < self._habits.linked)
        moved = 100 if order.part == "join" else 0
        self.mover.life.say(MovePrepared(order.number, peers=peers if order.part == "leave" else (), bytes_moved=moved))

    # ------------------------------------------------------------ in the loop

    def word(self) -> str:
        """What this member adds to an agreement: a leaver that has its order to commit says so."""
        order = self.order
        if order is None or not self._commit:
            return ""
        joiners = ",".join(f"{rank}={address.member}" for rank, address in sorted(order.ranks.items()))
        return f"{order.number}:{order.generation}:{joiners}"

    def commit(self, words: str, vote: Callable[[str], Program]) -> Program:
        """At the boundary after an agreement in which `words` were said: vote, and be in the new generation.

        One leaver that says so is enough. `vote(given)` makes the collective.
        """
        said = [word.split(":") for word in words.split("|") if word]
        if not said:
            return
        number, generation = int(said[0][0]), int(said[0][1])
        joiners = {int(rank): name for rank, name in (pair.split("=") for pair in said[0][2].split(","))}
        no = self._engine.rng.random() < self._habits.refuses
        sequence = self.mover.fabric.next_sequence
        yield from vote("no" if no else "yes")
        result = self.mover.fabric.results.get(sequence)
        if result == "yes":
            yield from self._passed(number, generation, joiners=joiners)
        elif result is not None and self.mover.rank in joiners:
            self._commit = False
            self._failed += 1
            self.mover.life.say(MoveRefused(number, self.mover.machine.version, "somebody was not quiet", self._failed))

    def _passed(self, number: int, generation: int, *, joiners: dict[int, str]) -> Program:
        mover = self.mover
        if mover.rank in joiners:
            mover.machine, act = hand_over(mover.machine, number, generation)
            mover.life.say(act.fact)
            heir = self._others(joiners[mover.rank])
            record = (mover.machine.version, mover.state, mover.private)
            self.clear()
            yield from mover.life.sleep(self._engine.delay(0.002), "handing over")
            self._engine.at(self._engine.delay(0.001), lambda: heir.mover.life.when_awake(lambda: heir.receive(record)))
            yield from mover.life.sleep(0.0, "handed over")
            return
        mover.machine = stay(mover.machine, generation)
        mover.fabric.install(generation, {**mover.fabric.roster, **joiners})
        self.clear()
        yield from mover.life.sleep(0.0, "stays")

    def receive(self, record: tuple[int, str, str]) -> None:
        """A joiner has all of its leaver's last update and private state: (version, state, private)."""
        if self.order is not None:
            self.record = record
            self.mover.life.resume()

    def may_take(self) -> bool:
        """True for a joiner that can take its rank now."""
        return self.record is not None and self.order is not None and may_take_over(self.mover.machine)

    def take_rank(self) -> Program:
        """Be the member of the rank."""
        mover, order, record = self.mover, self.order, self.record
        assert order is not None and record is not None
        yield from mover.life.sleep(self._engine.delay(0.002), "taking")
        version, mover.state, mover.private = record
        taken = MoveTaken(order.number, version, {"last_update_s": 0.001, "check_s": 0.001, "bytes": 0.0})
        mover.machine, act = take_over(mover.machine, taken, order.generation)
        mover.fabric.install(order.generation, {rank: a.member for rank, a in order.roster.items()})
        self.clear()
        mover.took_over()
        mover.life.say(act.fact)
        yield from mover.life.sleep(0.0, "taken")
