"""The paths of a job whose members change: the conductor knows who they are, whenever it may act."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from test_job_shell import StandingClock
from test_move_shell import Run

from keepstep.records.events import TrafficChange
from keepstep.records.messages import FirstStep, PathsReady, TakePaths
from keepstep.records.move_messages import MoveCommitted, MoveTaken
from keepstep.records.moves import MoveRequest
from keepstep.records.topology import ClosShape
from keepstep.service.keeper import Keeper
from keepstep.service.output import Console
from keepstep.service.path_desk import PathDesk, TrafficFile
from keepstep.traffic.clos import clos
from keepstep.traffic.path_actions import GivePaths, Seen
from keepstep.traffic.planner import Planner


def ports(desk: PathDesk) -> dict[int, int]:
    """Where the conductor takes the ranks to be."""
    return {rank: place.port for rank, place in desk._conductor._places.items()}


def test_a_rank_that_moved_is_where_its_joiner_is():
    async def played() -> list[dict[int, int]]:
        run = Run()
        planner = Planner(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2)))
        console = Console(lambda line, error: None)
        file = (TrafficFile(hops={}), planner)
        desk = PathDesk(run.shell, Keeper(run.journal), file=file, clock=StandingClock(), console=console)
        found = []
        desk.turn()
        found.append(ports(desk))
        await run.shell.move(MoveRequest((1,), wait=False))
        run.prepare()
        for fact in (MoveCommitted(1, 1, 7), MoveTaken(1, 7), FirstStep(1, 8)):
            run.say("m1" if isinstance(fact, MoveCommitted) else "m2", fact)
            desk.turn()
            found.append(ports(desk))
        console.close()
        return found

    before, after = {0: 0, 1: 1}, {0: 0, 1: 2}
    assert asyncio.run(played()) == [before, before, before, after]


def test_what_could_not_be_is_in_the_journal_as_refused():
    run = Run()
    planner = Planner(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2)))
    console = Console(lambda line, error: None)
    file = (TrafficFile(hops={}, stage="low_priority"), planner)
    desk = PathDesk(run.shell, Keeper(run.journal), file=file, clock=StandingClock(), console=console)
    desk.turn()
    desk._conductor.seen([Seen(rank, -1, 5) for rank in range(2)], generation=run.shell.state.generation)
    desk.turn()
    console.close()
    (change,) = [event for event in run.journal.replay() if isinstance(event, TrafficChange)]
    assert (change.change, change.applied) == ("refused", False)
    assert "called n0;" in change.reason


def test_the_plans_of_a_controller_that_took_over_are_newer_than_those_before(monkeypatch: pytest.MonkeyPatch):
    """Members keep the number of their plan while controllers change."""
    run = Run()
    planner = Planner(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2)))
    console = Console(lambda line, error: None)
    file = (TrafficFile(hops={}, stage="low_priority"), planner)
    desk = PathDesk(run.shell, Keeper(run.journal), file=file, clock=StandingClock(), console=console)
    heard: list[int] = []
    monkeypatch.setattr(desk._conductor, "ready", lambda rank, number, **given: heard.append(number))
    for ahead, number in enumerate((3, 1)):
        run.shell.state = msgspec.structs.replace(run.shell.state, epoch=1 + ahead)
        desk._obey(GivePaths(0, number, {}, {}))
    first, second = [sent.order.number for sent in run.sent if isinstance(sent.order, TakePaths)]
    assert first == 3 < second
    desk.take(PathsReady(second), rank=0)
    assert heard == [1]
    console.close()
