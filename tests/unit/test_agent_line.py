"""An agent's line: what the journal keeps is numbered, and nothing else, however long the job runs."""

from __future__ import annotations

import asyncio

import pytest
from test_job_shell import HELLO, SPEC, StandingClock, leading

from keepstep.errors import EnvironmentProblem, PeerLost
from keepstep.records.messages import Assignment, Drilled, MemberStarted, MemberStopped, PathsReady, StateDigest, Stop
from keepstep.records.watch_messages import MemberMoves
from keepstep.service import agent_line
from keepstep.service.agent_line import AgentRequest, Line
from keepstep.service.controller import JobShell
from keepstep.service.keeper import Keeper
from keepstep.service.outbox import MOST_KEPT
from keepstep.service.replaying import replay
from keepstep.service.settings import Settings
from keepstep.store.journal import MemoryJournal
from keepstep.store.remote_peer import Envelope
from keepstep.store.remote_twin import remote_pair

REQUEST = AgentRequest("c:1", "n1", "", None, Settings())


def test_the_next_controller_knows_the_newest_numbered_fact():
    """G-23: else it would ask for facts that the line does not keep any more."""

    async def work() -> None:
        journal, clock = MemoryJournal(), StandingClock()
        shell = JobShell(
            SPEC, lambda directed: None, keeper=Keeper(journal), clock=clock, leadership=leading("j", clock)
        )
        shell.watcher = lambda fact, node, member: isinstance(fact, StateDigest | PathsReady)
        shell.lead()
        controller, agent = remote_pair()
        line = Line(REQUEST, peer=agent, token="")
        line.say("", HELLO)
        line.say("m1", PathsReady(1, True))
        for version in range(MOST_KEPT + 1):
            line.say("m0", StateDigest(0, version, "d", "all"))
        line.say("", MemberStarted("m0", 0, "n1", 7))
        line.say("", Drilled("kill", 1, 31, 1234.5))
        await line.close()
        numbers = []
        for _ in range(MOST_KEPT + 5):
            envelope = await controller.receive()
            numbers.append(envelope.number)
            shell.feed(envelope.message, node="n1", member=envelope.member, number=envelope.number)
        assert [number for number in numbers if number] == [1, 2, 3]
        assert replay(journal.replay(), SPEC).heard == {"n1": 3}

    asyncio.run(work())


def test_a_stop_that_is_over_is_not_told_to_the_next_controller(monkeypatch):
    """It would replace a member that has gone on meanwhile."""

    async def work() -> None:
        first, agent = remote_pair()
        second, again = remote_pair()

        async def connected(address: str, **given: object):
            return again

        monkeypatch.setattr(agent_line, "connect_remote", connected)
        line = Line(REQUEST, peer=agent, token="")
        await first.close()
        for member in ("m0", "m1"):
            line.say(member, MemberStopped(member, 0, 1.0))
        line.say("m0", MemberMoves("m0", 0))
        second.post(Envelope("n1", "", Assignment(2, "j", "s.py", (), 1, 0, 0)))
        waiting = asyncio.ensure_future(line.next_order())
        await second.receive()
        told = [await second.receive() for _ in range(2)]
        assert [(e.number, type(e.message)) for e in told] == [(1, MemberMoves), (2, MemberStopped)]
        waiting.cancel()
        await line.close()

    asyncio.run(work())


def test_an_agent_that_hears_nothing_calls_again_before_its_controller_gives_it_up(monkeypatch):
    """Its first calls may go over the way that swallows, too: they are short. The old link stands until it is back: a
    controller that hears its end takes the node for lost."""

    async def work() -> None:
        first, agent = remote_pair()
        second, again = remote_pair()
        tries, looks = [], []

        async def silent(timeout_s: float) -> bool:
            looks.append(timeout_s)
            return False

        async def connected(address: str, *, token: str, timeout_s: float, silence_s: float):
            tries.append(timeout_s)
            if len(tries) < 3:
                raise EnvironmentProblem("no answer")
            return again

        monkeypatch.setattr(agent_line, "connect_remote", connected)
        monkeypatch.setattr(agent, "answers", silent)
        line = Line(AgentRequest("c:1", "n1", "", None, Settings(silence_s=1.0)), peer=agent, token="")
        second.post(Envelope("n1", "", Assignment(2, "j", "s.py", (), 1, 0, 0)))
        second.post(Envelope("n1", "", Stop(2, 0, "over"), 1))
        waiting = asyncio.ensure_future(line.next_order())
        enlisted = (await second.receive()).message
        assert enlisted.agent and enlisted.orders == 0 and not first.closed
        assert (await waiting).number == 1
        with pytest.raises(PeerLost):
            await first.receive()
        assert looks == [0.25] and tries == sorted(set(tries))
        silence_s = Settings().silence_s
        assert 2 * looks[0] * silence_s + sum(tries[:2]) < 0.75 * silence_s, "then its controller gives it up"
        await line.close()

    asyncio.run(work())
