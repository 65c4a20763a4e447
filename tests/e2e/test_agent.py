"""The agent with real processes and no torch: rings that survive, frozen members, drills at a step, who may connect."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from launching import LIMIT_S, MEMBER, PLAIN, alive

from keepstep.errors import KeepstepError, PeerLost
from keepstep.records.canary import CanaryLoss
from keepstep.records.messages import (
    Drill,
    Drilled,
    Fact,
    Hello,
    KillMember,
    MemberExited,
    MemberStarted,
    MemberStopped,
    StartFailed,
    StartMember,
    Welcome,
)
from keepstep.records.ring import read_private
from keepstep.service.agent import Agent, AgentPlan
from keepstep.service.clock import SystemClock
from keepstep.service.output import Console
from keepstep.service.settings import Settings
from keepstep.store.wire import Wire

ONE_RANK = {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class Node:
    """An agent and the facts it told; plays the controller by hand."""

    def __init__(self, directory: Path, script: str, arguments: tuple[str, ...], job: str) -> None:
        self.facts: list[Fact] = []
        self.lines: list[str] = []
        self.directory = directory
        self.news = asyncio.Event()
        self.console = Console(lambda line, error: self.lines.append(line))
        plan = AgentPlan(job, "n1", script, arguments, directory)
        self.agent = Agent(plan, self._take, settings=Settings(), clock=SystemClock(), console=self.console)

    def _take(self, member: str, fact: Fact) -> None:
        self.facts.append(fact)
        self.news.set()

    def start(self, member: str = "m0") -> None:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
        self.agent.obey("", StartMember(1, member, 0, 0, 0, ONE_RANK | rank))

    async def told(self, kind: type[Fact]) -> Fact:
        """The first fact of a kind, as soon as it is there."""

        async def look() -> Fact:
            while True:
                self.news.clear()
                for fact in self.facts:
                    if isinstance(fact, kind):
                        return fact
                await self.news.wait()

        return await asyncio.wait_for(look(), LIMIT_S)

    async def welcomed(self) -> MemberStarted:
        """Start one member and let it run."""
        self.start()
        hello = await self.told(Hello)
        self.agent.obey("m0", Welcome(1, 0, 1, 0, 0, 0, False, {0: hello.address}, b"s"))
        return await self.told(MemberStarted)


@asynccontextmanager
async def node(directory: Path, script: str, *arguments: str, job: str = "job") -> AsyncIterator[Node]:
    (directory / "logs").mkdir()
    one = Node(directory, script, arguments, job)
    await one.agent.open()
    try:
        yield one
    finally:
        await one.agent.close()
        one.console.close()


def playing(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_member_that_ends_well(tmp_path):
    async def work() -> None:
        async with node(tmp_path, MEMBER, "--steps", "4") as one:
            await one.welcomed()
            gone = await one.told(MemberExited)
        assert (gone.code, gone.signal, gone.protected) == (0, 0, True)
        assert gone.private == {1: b"private 1", 2: b"private 2", 3: b"private 3"}
        assert "[rank 0] step 3 loss 0.25" in one.lines
        assert (tmp_path / "logs" / "m0.log").read_text().splitlines()[-1] == "step 3 loss 0.25"
        assert not (tmp_path / "incidents").exists()
        last = tmp_path / "rings" / "rank0.ring"
        assert read_private(last.read_bytes()) == gone.private and list(last.parent.iterdir()) == [last]

    playing(work)


@pytest.mark.parametrize("step", [-1, 0, 7])
def test_a_drill_kills_in_its_step_and_the_ring_survives(tmp_path, step):
    """G-15"""

    async def work() -> None:
        async with node(tmp_path, MEMBER, "--steps", "9999") as one:
            process = await one.welcomed()
            one.agent.obey("", Drill(1, "kill", 0, step))
            drilled = await one.told(Drilled)
            gone = await one.told(MemberExited)
        assert (gone.code, gone.signal) == (137, signal.SIGKILL) and not alive(process.pid)
        assert drilled.step == step if step > 0 else drilled.step >= step
        assert drilled.at <= SystemClock().wall()
        (saved,) = (tmp_path / "incidents" / "1").iterdir()
        assert saved.name == "m0.ring" and read_private(saved.read_bytes()) == gone.private

    playing(work)


def test_a_drill_given_before_the_member_is_there(tmp_path):
    async def work() -> None:
        async with node(tmp_path, MEMBER, "--steps", "9999") as one:
            one.agent.obey("", Drill(1, "kill", 0, 3))
            await one.welcomed()
            assert (await one.told(Drilled)).step == 3

    playing(work)


def test_a_frozen_member_is_reported_once_and_not_woken(tmp_path):
    async def work() -> None:
        async with node(tmp_path, MEMBER, "--steps", "9999") as one:
            process = await one.welcomed()
            one.agent.obey("", Drill(1, "freeze", 0, 5))
            drilled = await one.told(Drilled)
            stopped = await one.told(MemberStopped)
            assert stopped.member == "m0" and stopped.since >= drilled.at and 5 in stopped.private
            one.agent.obey("", KillMember(1, "m0", 30.0))
            await asyncio.sleep(0.5)
            assert alive(process.pid) and sum(isinstance(fact, MemberStopped) for fact in one.facts) == 1
            one.agent.obey("", KillMember(1, "m0", 30.0))
            assert (await one.told(MemberExited)).signal == signal.SIGKILL

    playing(work)


def test_a_script_that_never_says_hello_is_not_protected(tmp_path):
    async def work() -> None:
        async with node(tmp_path, PLAIN, "--linger", "0") as one:
            one.start()
            assert (await one.told(MemberExited)).protected is False

    playing(work)


@pytest.mark.parametrize(("job", "told"), [("job", []), ("job-canary-3", ["inf"])])
def test_in_a_canary_a_loss_that_is_no_finite_number_is_told_before_its_member_ends(tmp_path, job, told):
    async def work() -> None:
        async with node(tmp_path, PLAIN, "--say", "step 2 loss inf\nstep 3 loss nan", "--linger", "0", job=job) as one:
            one.start()
            await one.told(MemberExited)
        kinds = (CanaryLoss, MemberExited)
        said = [fact for fact in one.facts if isinstance(fact, kinds)]
        assert [fact.loss for fact in said if isinstance(fact, CanaryLoss)] == told
        assert isinstance(said[-1], MemberExited)

    playing(work)


def test_only_processes_the_agent_started_are_served(tmp_path):
    async def work() -> None:
        async with node(tmp_path, PLAIN, "--environment", str(tmp_path / "env"), "--linger", "99") as one:
            one.start()
            path = tmp_path / "env.0.0"
            while not (path.is_file() and path.read_text().endswith("}")):
                await asyncio.sleep(0.01)
            name = path.read_text().split('"KEEPSTEP_AGENT": "')[1].split('"')[0]
            with pytest.raises(PeerLost):
                await asyncio.to_thread(lambda: Wire.connect(name).receive_descriptor(LIMIT_S))

    playing(work)


def test_an_order_to_end_is_carried_out_even_by_the_deaf(tmp_path):
    async def work() -> None:
        async with node(tmp_path, PLAIN, "--deaf", "--say", "ready", "--linger", "99") as one:
            one.start()
            while "[rank 0] ready" not in one.lines:
                await asyncio.sleep(0.01)
            one.agent.obey("", KillMember(1, "m0", 0.2))
            gone = await one.told(MemberExited)
            assert gone.signal == signal.SIGKILL and not (tmp_path / "incidents").exists()

    playing(work)


def test_a_process_that_cannot_be_started_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "no python here"))

    async def work() -> None:
        with pytest.raises(KeepstepError, match="cannot start a process"):
            async with node(tmp_path, PLAIN):
                pass

    playing(work)


def test_a_member_that_cannot_be_started_is_told(tmp_path, monkeypatch):
    async def work() -> None:
        async with node(tmp_path, PLAIN) as one:
            monkeypatch.setattr("sys.executable", str(tmp_path / "no python here"))
            one.start()
            assert "no python here" in (await one.told(StartFailed)).why

    playing(work)


def test_closing_ends_every_process(tmp_path):
    """G-16"""

    async def work() -> None:
        async with node(tmp_path, PLAIN, "--deaf", "--linger", "99") as one:
            one.start("m0")
            one.start("m1")
            pids = [fact.pid for fact in one.facts if isinstance(fact, MemberStarted)]
            assert len(pids) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert [pid for pid in pids if alive(pid)] == []

    playing(work)
