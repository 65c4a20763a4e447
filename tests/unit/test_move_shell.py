"""A move through the shell: asked for, answered when it is over, and in the journal so that it can be replayed."""

from __future__ import annotations

import asyncio

import pytest
from test_job_shell import StandingClock, leading

from keepstep.control.job_state import Directed, JobSpec, StopRequest
from keepstep.errors import MoveNotMade, UsageError
from keepstep.records.address import Address
from keepstep.records.events import MoveAsked, MoveRecord
from keepstep.records.messages import AgentHello, FirstStep, Hello, MemberExited, Ready
from keepstep.records.mirror_messages import PlaceMirror
from keepstep.records.move_messages import CommitMove, MoveCommitted, MovePrepared, MoveTaken, PrepareMove
from keepstep.records.moves import MoveRequest
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.replaying import replay
from keepstep.store.journal import MemoryJournal

SPEC = JobSpec(job="j", world=2, nnodes=1, keepstep_version="1", secret=b"s" * 32)


class Run:
    """A job of two ranks and a standby that has made a step; what the shell sends is in `sent`."""

    def __init__(self) -> None:
        self.sent: list[Directed] = []
        self.journal = MemoryJournal()
        clock = StandingClock()
        self.shell = JobShell(
            SPEC, self.sent.append, keeper=Keeper(self.journal), clock=clock, leadership=leading(SPEC.job, clock)
        )
        self.shell.lead()
        self.shell.feed(AgentHello("n0", 2, 1, "1"), node="n0")
        for port, (name, rank) in enumerate((("m0", 0), ("m1", 1), ("m2", -1))):
            address = Address(name, "n0", name, "n0", port)
            self.shell.feed(Hello(name, rank, 2, 1, address, "1", "2"), node="n0", member=name)
        for name in ("m0", "m1"):
            self.shell.feed(FirstStep(0, 1), node="n0", member=name)

    def say(self, member: str, fact) -> None:
        """A member speaks."""
        self.shell.feed(fact, node="n0", member=member)

    def orders(self, kind: type) -> list[str]:
        """Who got an order of that kind, in order."""
        return [directed.member for directed in self.sent if isinstance(directed.order, kind)]

    def prepare(self) -> None:
        """All that take part answer, up to the order to commit."""
        self.say("m2", Ready(0, "all"))
        self.say("m1", MovePrepared(1, peers=(0,)))
        self.say("m2", MovePrepared(1, bytes_moved=9))
        self.say("m0", MovePrepared(1))

    def commit(self) -> None:
        """The vote passes and the joiner makes its step."""
        self.say("m1", MoveCommitted(1, 1, 7))
        self.say("m2", MoveTaken(1, 7, {"check_s": 0.5}))
        self.say("m2", FirstStep(1, 8))


def test_the_answer_comes_when_the_move_is_over():
    async def played() -> str:
        run = Run()
        answer = asyncio.ensure_future(run.shell.move(MoveRequest((1,))))
        await asyncio.sleep(0)
        run.prepare()
        assert run.orders(PrepareMove) == ["m1", "m2", "m0"] and run.orders(CommitMove) == ["m1"]
        assert not answer.done()
        run.commit()
        return await answer

    assert asyncio.run(played()).startswith("move 1 is made: rank 1 from m1 on n0 to m2 on n0")


def test_a_joiner_knows_before_the_commit_who_holds_its_mirror():
    async def played() -> Run:
        run = Run()
        await run.shell.move(MoveRequest((1,), wait=False))
        run.prepare()
        return run

    sent = asyncio.run(played()).sent
    placed = [one for one in sent if isinstance(one.order, PlaceMirror) and one.order.generation == 1]
    assert [(one.member, one.order.holder) for one in placed] == [("m2", 0)]
    assert sent.index(placed[0]) < next(at for at, one in enumerate(sent) if isinstance(one.order, CommitMove))


def test_a_move_that_is_given_up_is_no_success():
    async def played() -> None:
        run = Run()
        answer = asyncio.ensure_future(run.shell.move(MoveRequest((1,))))
        await asyncio.sleep(0)
        run.say("m2", MemberExited("m2", -1, -9, 9))
        with pytest.raises(MoveNotMade, match="m2, which was to take rank 1, ended"):
            await answer

    asyncio.run(played())


def test_the_job_may_end_while_somebody_waits():
    async def played() -> None:
        run = Run()
        answer = asyncio.ensure_future(run.shell.move(MoveRequest((1,))))
        await asyncio.sleep(0)
        run.shell.feed(StopRequest(130, "interrupted"))
        with pytest.raises(MoveNotMade, match="the job ended"):
            await answer

    asyncio.run(played())


def test_without_waiting_it_says_what_will_happen_and_twice_at_once_is_refused():
    async def played() -> str:
        run = Run()
        said = await run.shell.move(MoveRequest((1,), wait=False))
        with pytest.raises(UsageError, match=r"move 1 \(rank 1\) is under way"):
            await run.shell.move(MoveRequest((0,)))
        return said

    assert asyncio.run(played()) == "move 1: rank 1 from m1 on n0 to a standby on n0"


@pytest.mark.parametrize("upto", ["asked", "prepared", "over"])
def test_another_controller_finds_the_move_where_it_was(upto):
    async def played() -> Run:
        run = Run()
        await run.shell.move(MoveRequest((1,), wait=False))
        if upto != "asked":
            run.prepare()
        if upto == "over":
            run.commit()
        return run

    run = asyncio.run(played())
    events = list(run.journal.replay())
    assert [type(event) for event in events if isinstance(event, MoveAsked | MoveRecord)] == [
        MoveAsked,
        *([MoveRecord] if upto == "over" else []),
    ]
    assert replay(events, SPEC).state == run.shell.state
