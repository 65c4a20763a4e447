"""An agent comes to its job whenever it is started: before the controller, in a canary, between canary and job."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
from test_job_shell import SPEC

from keepstep.errors import EnvironmentProblem, MembershipError
from keepstep.records.messages import Assignment, Stop
from keepstep.service.agent_line import AgentRequest
from keepstep.service.remote_agent import admitted
from keepstep.service.settings import Settings
from keepstep.store.remote import RemoteServer, serve_remote
from keepstep.store.remote_peer import Envelope, RemotePeer

LIMIT_S = 30.0
TOKEN = "a token of many letters"
ASSIGNED = Assignment(1, SPEC.job, "train.py", (), 1, 0, 0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def asking(port: int, patience_s: float = LIMIT_S) -> AgentRequest:
    return AgentRequest(f"127.0.0.1:{port}", "n1", "", None, Settings(controller_patience_s=patience_s))


class Controller:
    """Gives everybody who enlists the same `answer` (None: hangs up). `asked` is set when somebody has."""

    def __init__(self, answer: Assignment | Stop | None) -> None:
        self.answer = answer
        self.asked = asyncio.Event()
        self.server: RemoteServer

    async def attend(self, peer: RemotePeer) -> None:
        await peer.receive()
        if self.answer is not None:
            await peer.send(Envelope("n1", "", self.answer))
        self.asked.set()
        if self.answer is not None:
            await peer.receive()

    async def open(self, port: int) -> Controller:
        self.server = await serve_remote("127.0.0.1", port, token=TOKEN, on_peer=self.attend)
        return self


@pytest.mark.parametrize("first", [Stop(0, 0, "the canary is over"), None], ids=["sent away", "hung up"])
def test_an_agent_waits_for_the_controller_of_its_job(first: Stop | None):
    async def work() -> None:
        port = free_port()
        coming = asyncio.ensure_future(admitted(asking(port), TOKEN))
        canary = await Controller(first).open(port)
        await canary.asked.wait()
        await canary.server.close()
        assert not coming.done()
        job = await Controller(ASSIGNED).open(port)
        peer, assignment = await coming
        assert assignment == ASSIGNED
        await peer.close()
        await job.server.close()

    run(work())


def test_it_does_not_wait_for_ever():
    async def work() -> None:
        with pytest.raises(EnvironmentProblem, match=r"no controller came within 0\.3 s.*refused"):
            await admitted(asking(free_port(), 0.3), TOKEN)
        with pytest.raises(EnvironmentProblem, match="did not begin after its canary"):
            await admitted(asking(free_port(), 0.3), TOKEN, again=True)

    run(work())


def test_a_refusal_is_one_at_once():
    async def work() -> None:
        controller = await Controller(Stop(0, 2, "job j is ending")).open(0)
        with pytest.raises(MembershipError, match="job j is ending") as refused:
            await admitted(asking(controller.server.port), TOKEN)
        assert refused.value.exit_code == 2
        with pytest.raises(MembershipError, match="token"):
            await admitted(asking(controller.server.port), "another token of many letters")
        await controller.server.close()

    run(work())


def test_between_a_canary_and_its_job_anything_may_listen():
    async def other_program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.7\r\n")
        writer.close()
        called.set()

    called = asyncio.Event()

    async def work() -> None:
        other = await asyncio.start_server(other_program, "127.0.0.1", 0)
        port = int(other.sockets[0].getsockname()[1])
        coming = asyncio.ensure_future(admitted(asking(port), TOKEN, again=True))
        await called.wait()
        other.close()
        await other.wait_closed()
        job = await Controller(ASSIGNED).open(port)
        peer, _ = await coming
        await peer.close()
        await job.server.close()

    run(work())
