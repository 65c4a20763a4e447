"""Controllers that die at any moment, in the seeded worlds: the next one rebuilds the job from the journal's lines.

They die between turns and inside them: after the fact and before the orders, between two orders, while they are sent,
and while a new one makes up for what the last one left undone. G-23: the job goes on as if one controller had led it
all the time.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from keepstep.control.job import decide
from keepstep.control.job_state import Decision, Directed, Event, JobState, TakeOver, Tick
from keepstep.records import events
from keepstep.records.journal_line import decode_line, encode_line
from keepstep.service.outbox import Outboxes
from keepstep.service.replaying import acted, event_record, order_record, replay
from keepstep.simulation.verdict import judge
from keepstep.simulation.world import World, draw_plan

QUICK, BLOCK, MANY = 200, 100, 4000


class Led(World):
    """A world that keeps what a controller journals, and whose controllers die now and then.

    While nobody leads, facts wait: agents keep them and send them again.
    """

    def __init__(self, plan) -> None:
        super().__init__(plan)
        self.rng = random.Random(plan.seed)
        self.lines = [encode_line(events.LeaderRecord(job="sim", epoch=1))]
        self.alive = True
        self.waiting: list[Event] = []
        self.moments: int | None = None
        self.sent = Outboxes()
        self.got = dict.fromkeys(self._agents, 0)
        self.deaths = self.cut_off = 0
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            self.engine.at(self.rng.uniform(0.0, 6.0), self.doom)

    # ------------------------------------------------------------ what a controller does

    def feed(self, event: Event) -> None:
        passing, record = isinstance(event.fact, Tick), event_record(event, job="sim", now=self.engine.now)
        if not self.alive or not (passing or self.keep(record)):
            self.hold(event)
            return
        decision = decide(self.state, event, now=self.engine.now)
        if passing and acted(self.state, decision) and not self.keep(record):
            return
        self.take(event, decision)
        self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        orders = [self.sent.numbered(directed) for directed in decision.orders]
        told = [*decision.findings, *decision.incidents, *decision.moves]
        told += [order_record(directed, self.state, now=self.engine.now) for directed in orders]
        if all(self.keep(record) for record in told):
            for directed in orders:
                if self.lives():
                    self.send(directed)
        self.cut_off += not self.alive and bool(orders)

    def keep(self, record: events.Event) -> bool:
        """Write one record; False if the controller is dead before."""
        if self.lives():
            self.lines.append(encode_line(record))
        return self.alive

    def send(self, directed: Directed) -> None:
        self.got[directed.node] += 1
        assert directed.number == self.got[directed.node], "an order is lost or given twice"
        super().send(directed)

    # ------------------------------------------------------------ its end, and the next one

    def doom(self) -> None:
        """The controller dies, or after so many more records and orders."""
        self.moments = self.rng.choice((0, 0, 1, 1, 2, 3, 4, 6, 9))
        if not self.moments:
            self.die()

    def lives(self) -> bool:
        """One more moment of the controller: False if it is dead by now."""
        if self.alive and self.moments is not None:
            self.moments -= 1
            if self.moments < 0:
                self.die()
        return self.alive

    def die(self) -> None:
        self.moments = None
        if self.alive and self.state.phase != "done":
            self.alive = False
            self.deaths += 1
            self.engine.at(self.rng.uniform(0.01, 3.0), self.take_over)

    def hold(self, event: Event) -> None:
        if not isinstance(event.fact, Tick | TakeOver):
            self.waiting.append(event)

    def take_over(self) -> None:
        left = replay([decode_line(line) for line in self.lines], self.state.spec)
        assert not _moved(self.state, left.state)
        self.state, self.sent = left.state, left.sent
        waiting, self.waiting, self.alive = self.waiting, [], True
        steps = self.plan.script.steps  # what is heard now may be news of a job that has made its last step meanwhile
        self.injector.late = self.injector.late or any(t.machine.version >= steps for t in self.trainees.values())
        for node, number in tuple(self.got.items()):
            for directed in self.sent.after(node, number):
                self.send(directed)
        self.carry_out(left.untold)
        self.feed(Event("", "", TakeOver(self.state.epoch + 1)))
        for event in waiting:
            self.feed(event)

    def journalled(self, kind: type) -> list[events.Event]:
        return [record for line in self.lines if isinstance(record := decode_line(line), kind)]


def _moved(one: JobState, other: JobState) -> bool:
    return msgspec.structs.replace(one, clock=0.0) != msgspec.structs.replace(other, clock=0.0)


def play(seed: int) -> Led:
    world = Led(draw_plan(seed))
    judge(world, ended=world.run())
    if world.alive:  # else nobody is left to write the last ones
        assert world.journalled(events.Incident) == world.incidents
        assert world.journalled(events.MoveRecord) == world.moves
    return world


@pytest.mark.parametrize("first", range(0, QUICK, BLOCK))
def test_seeds(first):
    worlds = [play(seed) for seed in range(first, first + BLOCK)]
    assert sum(world.deaths for world in worlds) > 50
    assert sum(world.cut_off for world in worlds) > 10, "nobody dies inside a turn"
    assert sum(world.state.exit_code == 0 for world in worlds) > 65


@pytest.mark.long
@pytest.mark.parametrize("first", range(QUICK, MANY, 400))
def test_many_seeds(first):
    assert all(play(seed).state.phase == "done" for seed in range(first, first + 400))
