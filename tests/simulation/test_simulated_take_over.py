"""Controllers that die at any moment, in the seeded worlds: the next one rebuilds the job from the journal's lines.

G-23: the job goes on as if one controller had led it all the time.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from keepstep.control.job_state import Event, JobState, TakeOver, Tick
from keepstep.records.journal_line import decode_line, encode_line
from keepstep.records.lifecycle import LeaderRecord
from keepstep.service.replaying import event_record, replay
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
        self.lines = [encode_line(LeaderRecord(job="sim", epoch=1))]
        self.waiting: list[Event] | None = None
        self.deaths = 0
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            self.engine.at(self.rng.uniform(0.0, 6.0), self.die)

    def feed(self, event: Event) -> None:
        if self.waiting is not None:
            if not isinstance(event.fact, Tick):
                self.waiting.append(event)
            return
        before, told = self.state, len(self.journal)
        super().feed(event)
        if not isinstance(event.fact, Tick) or len(self.journal) > told or _moved(before, self.state):
            self.lines.append(encode_line(event_record(event, job="sim", now=self.engine.now)))

    def die(self) -> None:
        if self.waiting is None and self.state.phase != "done":
            self.waiting = []
            self.deaths += 1
            self.engine.at(self.rng.uniform(0.01, 3.0), self.take_over)

    def take_over(self) -> None:
        left = self.state
        self.state = replay([decode_line(line) for line in self.lines], left.spec).state
        assert not _moved(self.state, left)
        waiting, self.waiting = self.waiting or [], None
        steps = self.plan.script.steps  # what is heard now may be news of a job that has made its last step meanwhile
        self.injector.late = self.injector.late or any(t.machine.version >= steps for t in self.trainees.values())
        self.feed(Event("", "", TakeOver(left.epoch + 1)))
        for event in waiting:
            self.feed(event)


def _moved(one: JobState, other: JobState) -> bool:
    return msgspec.structs.replace(one, clock=0.0) != msgspec.structs.replace(other, clock=0.0)


def play(seed: int) -> Led:
    world = Led(draw_plan(seed))
    judge(world, ended=world.run())
    return world


@pytest.mark.parametrize("first", range(0, QUICK, BLOCK))
def test_seeds(first):
    worlds = [play(seed) for seed in range(first, first + BLOCK)]
    assert sum(world.deaths for world in worlds) > 50
    assert sum(world.state.exit_code == 0 for world in worlds) > 65


@pytest.mark.long
@pytest.mark.parametrize("first", range(QUICK, MANY, 400))
def test_many_seeds(first):
    assert all(play(seed).state.phase == "done" for seed in range(first, first + 400))
