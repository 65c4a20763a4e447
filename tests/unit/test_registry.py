"""One controller, many jobs: agents come, work and go, over the in-memory link."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from test_job_shell import SPEC, StandingClock, leading

from keepstep import __version__
from keepstep.control.job_state import JobSpec
from keepstep.errors import UsageError
from keepstep.records.messages import (
    Address,
    AgentHello,
    Assignment,
    Enlist,
    FirstStep,
    Hello,
    MemberExited,
    MemberStarted,
    StartMember,
    Stop,
)
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.registry import Registry
from keepstep.store.journal import MemoryJournal
from keepstep.store.remote_peer import Envelope, RemotePeer
from keepstep.store.remote_twin import remote_pair

LIMIT_S = 10.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


def served(registry: Registry, job: str, *, nnodes: int = 1) -> JobShell:
    spec = JobSpec(job, world=nnodes, nnodes=nnodes, keepstep_version=__version__, secret=SPEC.secret, max_restarts=0)
    clock = StandingClock()
    keeper, right = Keeper(MemoryJournal()), leading(job, clock)
    shell = JobShell(spec, lambda d: registry.send(job, d), keeper=keeper, clock=clock, leadership=right)
    registry.add(shell, Assignment(1, job, "train.py", ("--x",), 1, 0, 0))
    return shell


class FakeAgent:
    """An agent's end of the link."""

    def __init__(self, registry: Registry, node: str) -> None:
        ours, theirs = remote_pair()
        self.node = node
        self.peer: RemotePeer = ours
        self.attending = asyncio.ensure_future(registry.attend(theirs))

    async def say(self, message: Any, member: str = "") -> None:
        await self.peer.send(Envelope(self.node, member, message))

    async def hear(self) -> Any:
        return (await self.peer.receive()).message

    async def enlist(self, job: str, version: str = __version__) -> Any:
        await self.say(Enlist(self.node, job, version))
        return await self.hear()

    async def leave(self) -> None:
        await self.peer.close()
        await asyncio.wait({self.attending})


def test_two_jobs_do_not_meet():
    async def work() -> None:
        registry = Registry()
        shells = {job: served(registry, job) for job in ("one", "two")}
        for job, shell in shells.items():
            agent = FakeAgent(registry, "n1")
            assert isinstance(await agent.enlist(job), Assignment)
            await agent.say(AgentHello("n1", 1, 0, __version__))
            start = await agent.hear()
            assert isinstance(start, StartMember)
            await agent.say(MemberExited(start.member, 0, 0, 0, protected=False), start.member)
            await asyncio.wait_for(shell.done.wait(), LIMIT_S)
            await registry.dismiss(job, code=0, why="done")
            assert isinstance(await agent.hear(), Stop)
            await agent.leave()
        assert [shell.state.exit_code for shell in shells.values()] == [0, 0]

    run(work())


@pytest.mark.parametrize(
    ("job", "version", "says"),
    [("three", __version__, "no job"), ("", __version__, "no job"), ("one", "0.0.1", "0.0.1")],
)
def test_who_does_not_fit_is_refused_with_a_reason(job, version, says):
    async def work() -> None:
        registry = Registry()
        served(registry, "one")
        served(registry, "two")
        agent = FakeAgent(registry, "n1")
        answer = await agent.enlist(job, version)
        assert isinstance(answer, Stop) and answer.code != 0 and says in answer.why
        await agent.leave()

    run(work())


def test_a_node_name_is_taken_once():
    async def work() -> None:
        registry = Registry()
        served(registry, "one", nnodes=2)
        first, second = FakeAgent(registry, "n1"), FakeAgent(registry, "n1")
        assert isinstance(await first.enlist("one"), Assignment)
        answer = await second.enlist("one")
        assert isinstance(answer, Stop) and "n1" in answer.why
        await first.leave()
        await second.leave()

    run(work())


def test_the_members_of_an_agent_that_leaves_are_lost():
    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one")
        agent = FakeAgent(registry, "n1")
        await agent.enlist("one")
        await agent.say(AgentHello("n1", 1, 0, __version__))
        start = await agent.hear()
        await agent.say(MemberStarted(start.member, 0, "n1", 1))
        await agent.leave()
        assert shell.done.is_set() and shell.state.exit_code == 137

    run(work())


def test_a_job_name_is_taken_once():
    registry = Registry()
    served(registry, "one")
    with pytest.raises(UsageError, match="one"):
        served(registry, "one")


def test_an_agent_comes_back_to_the_next_controller_with_what_was_missed():
    """Orders it did not get are sent again, facts it said while nobody led are taken, none of either twice."""

    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one")
        agent = FakeAgent(registry, "n1")
        await agent.enlist("one")
        await agent.peer.send(Envelope("n1", "", AgentHello("n1", 1, 0, __version__), 1))
        start = (await agent.peer.receive()).message
        assert isinstance(start, StartMember)
        later = Registry()
        later.add(shell, Assignment(2, "one", "train.py", (), 1, 0, 0))
        back = FakeAgent(later, "n1")
        await back.say(Enlist("n1", "one", __version__, 0))
        known = await back.hear()
        assert isinstance(known, Assignment) and known.facts == 1
        again = await back.peer.receive()
        assert (again.message, again.number) == (start, 1)
        for _ in range(2):
            await back.peer.send(Envelope("n1", start.member, MemberStarted(start.member, 0, "n1", 7), 2))
        await back.peer.send(Envelope("n1", start.member, MemberExited(start.member, 0, 0, 0, protected=False), 3))
        await asyncio.wait_for(shell.done.wait(), LIMIT_S)
        assert shell.heard == {"n1": 3} and shell.state.exit_code == 0
        await back.leave()
        await agent.leave()

    run(work())


def test_an_agent_calls_again_where_nothing_comes_through_and_nobody_is_lost():
    """Neither side has seen the end of the first link; only the process that has it may call again."""

    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one")
        agent = FakeAgent(registry, "n1")
        await agent.say(Enlist("n1", "one", __version__, -1, "first"))
        await agent.hear()
        await agent.peer.send(Envelope("n1", "", AgentHello("n1", 1, 0, __version__), 1))
        start = await agent.hear()
        for name in ("", "other"):
            stranger = FakeAgent(registry, "n1")
            await stranger.say(Enlist("n1", "one", __version__, 0, name))
            answer = await stranger.hear()
            assert isinstance(answer, Stop) and "given up" in answer.why
            await stranger.leave()
        again = FakeAgent(registry, "n1")
        await again.say(Enlist("n1", "one", __version__, 0, "first"))
        assert (await again.hear()).facts == 1
        assert await again.hear() == start
        await asyncio.wait({agent.attending})
        assert not shell.state.nodes[0].gone
        await again.peer.send(Envelope("n1", start.member, MemberExited(start.member, 0, 0, 0, protected=False), 2))
        await asyncio.wait_for(shell.done.wait(), LIMIT_S)
        assert shell.state.exit_code == 0
        await again.leave()

    run(work())


def test_agents_that_stay_away_are_lost_and_strangers_are_refused():
    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one")
        first = FakeAgent(registry, "n1")
        await first.enlist("one")
        await first.say(AgentHello("n1", 1, 0, __version__))
        await first.hear()
        later = Registry()
        assert later.add(shell, Assignment(2, "one", "train.py", (), 1, 0, 0)) == {"n1"}
        for node, orders, says in (("n2", 0, "given up"), ("n1", -1, "is to come back")):
            stranger = FakeAgent(later, node)
            await stranger.say(Enlist(node, "one", __version__, orders))
            answer = await stranger.hear()
            assert isinstance(answer, Stop) and says in answer.why
            await stranger.leave()
        later.give_up("one")
        assert shell.state.exit_code is not None or shell.state.phase in ("restarting", "changing", "gathering")
        late = FakeAgent(later, "n1")
        await late.say(Enlist("n1", "one", __version__, 1))
        answer = await late.hear()
        assert isinstance(answer, Stop) and "given up" in answer.why
        await late.leave()
        await first.leave()

    run(work())


@pytest.mark.parametrize("code", [0, 3])
def test_agents_that_a_canary_does_not_need_hear_its_end(code: int):
    """They start nothing in it; with code 0 they come again, for the job itself."""

    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one-canary-5")
        agents = [FakeAgent(registry, node) for node in ("n1", "n2")]
        assert isinstance(await agents[0].enlist("one"), Assignment)
        await agents[1].say(Enlist("n2", "", __version__))
        await agents[0].say(AgentHello("n1", 1, 0, __version__))
        start = await agents[0].hear()
        await agents[0].say(MemberExited(start.member, 0, code, 0, protected=False), start.member)
        await asyncio.wait_for(shell.done.wait(), LIMIT_S)
        assert [node.name for node in shell.state.nodes] == ["n1"]
        ending = FakeAgent(registry, "n3")
        await ending.say(Enlist("n3", "one", __version__))
        await registry.dismiss("one-canary-5", code=code, why="over")
        late = FakeAgent(registry, "n4")
        await late.say(Enlist("n4", "one", __version__))
        for agent in (*agents, ending, late):
            answer = await agent.hear()
            assert isinstance(answer, Stop) and answer.code == code and "over" in answer.why
            await agent.leave()

    run(work())


def test_a_canary_that_loses_an_agent_before_it_begins_calls_in_another():
    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one-canary-5")
        first, second = FakeAgent(registry, "n1"), FakeAgent(registry, "n2")
        assert isinstance(await first.enlist("one"), Assignment)
        await second.say(Enlist("n2", "one", __version__))
        double = FakeAgent(registry, "n1")
        assert isinstance(await double.enlist("one"), Stop)  # by now the second waits
        await double.leave()
        await first.leave()
        assert shell.state.phase == "gathering"
        answer = await second.hear()
        assert isinstance(answer, Stop) and answer.code == 0
        await second.leave()
        again = FakeAgent(registry, "n2")
        assert isinstance(await again.enlist("one"), Assignment)
        await again.leave()

    run(work())


def test_a_node_that_was_given_up_is_not_awaited_by_the_next_controller():
    """G-24: its agent and its processes take no part any more, wherever they were; a fresh agent may come at once."""

    async def work() -> None:
        registry = Registry()
        shell = served(registry, "one", nnodes=2)
        agents = [FakeAgent(registry, node) for node in ("n1", "n2")]
        for agent in agents:
            await agent.enlist("one")
            await agent.say(AgentHello(agent.node, 1, 1, __version__))
        await agents[1].hear()
        for name, rank, node in (("m0", 0, "n1"), ("m1", 1, "n2"), ("m2", -1, "n1"), ("m3", -1, "n2")):
            hello = Hello(name, rank, 2, 1, Address(name, node, name, node, 1), __version__, "2")
            shell.feed(hello, node=node, member=name)
        for name, node in (("m0", "n1"), ("m1", "n2")):
            shell.feed(FirstStep(0, 1), node=node, member=name)
        await agents[1].leave()
        assert shell.state.phase == "changing"
        later = Registry()
        assert later.add(shell, Assignment(2, "one", "train.py", (), 1, 1, 0)) == {"n1"}
        stale = FakeAgent(later, "n2")
        await stale.say(Enlist("n2", "one", __version__, 2))
        answer = await stale.hear()
        assert isinstance(answer, Stop) and "n2 was given up" in answer.why
        await stale.leave()
        fresh = FakeAgent(later, "n2")
        assert isinstance(await fresh.enlist("one"), Assignment)
        await fresh.leave()
        await agents[0].leave()

    run(work())
