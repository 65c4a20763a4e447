"""The member's link to its agent: one contract, over a socket and in memory."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keepstep.errors import EnvironmentProblem, PeerLost, RecordError, TransportError, UsageError
from keepstep.records.messages import Finished, MemberExited, Message, PeerLostReport, Stop
from keepstep.store.unix_socket import listen_unix, peer_pid
from keepstep.store.wire import MemberWire, Wire
from keepstep.store.wire_server import MAX_UNREAD_BYTES, AgentWire, serve
from keepstep.store.wire_twin import wire_pair

LIMIT_S = 30.0
BIG = MemberExited(member="m", rank=1, code=0, signal=9, private={7: b"x" * 4_000_000})

Pair = tuple[MemberWire, AgentWire]


def fresh_name() -> str:
    return f"keepstep-test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


@asynccontextmanager
async def socket_pair() -> AsyncIterator[Pair]:
    arrived: asyncio.Future[AgentWire] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_connect(peer: AgentWire) -> None:
        arrived.set_result(peer)
        await over.wait()

    server = await serve(fresh_name(), on_connect)
    member = await asyncio.to_thread(Wire.connect, server.name)
    try:
        yield member, await arrived
    finally:
        over.set()
        member.close()
        await server.close()


@asynccontextmanager
async def memory_pair() -> AsyncIterator[Pair]:
    member, agent = wire_pair(pid=os.getpid())
    yield member, agent
    member.close()
    await agent.close()


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(limited())


@pytest.fixture(params=[socket_pair, memory_pair], ids=["socket", "memory"])
def on_pair(request: pytest.FixtureRequest) -> Callable[[Callable[[Any, Any], Awaitable[None]]], None]:
    """Runs an async function of (member, agent) over each kind of link."""

    def play(scene: Callable[[MemberWire, AgentWire], Awaitable[None]]) -> None:
        async def play_it() -> None:
            async with request.param() as (member, agent):
                await scene(member, agent)

        run(play_it())

    return play


def report(rank: int) -> PeerLostReport:
    return PeerLostReport(generation=1, rank=rank)


def test_messages_of_every_size_go_both_ways_in_order(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        assert agent.pid == os.getpid()
        messages: list[Message] = [report(1), BIG, report(2)]

        def echo() -> list[Message | None]:
            for message in messages:
                member.send(message)
            return [member.receive(LIMIT_S) for _ in messages]

        echoed = asyncio.create_task(asyncio.to_thread(echo))
        for message in messages:
            got = await agent.receive()
            assert got == message
            await agent.send(got)
        assert await echoed == messages

    on_pair(scene)


def test_silence_gives_none(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        assert await asyncio.to_thread(member.receive, 0.01) is None
        agent.post(report(1))
        assert await asyncio.to_thread(member.receive, LIMIT_S) == report(1)

    on_pair(scene)


def test_a_descriptor_passes_between_messages(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        memory = os.memfd_create("ring")
        os.write(memory, b"recorder")
        agent.post(report(1))
        agent.post_descriptor(memory)
        os.close(memory)  # ours may be closed at once
        await agent.send(report(2))
        received = await asyncio.to_thread(member.receive_descriptor, LIMIT_S)
        assert os.pread(received, 8, 0) == b"recorder"
        assert not os.get_inheritable(received)
        os.close(received)
        assert [member.receive(LIMIT_S), member.receive(LIMIT_S)] == [report(1), report(2)]
        with pytest.raises(TransportError, match="no file descriptor"):
            await asyncio.to_thread(member.receive_descriptor, 0.01)

    on_pair(scene)


def test_what_a_member_said_before_it_left_is_read(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        await agent.send(report(9))  # never read by the member: the kernel reports a reset
        member.send(Finished(version=60))
        member.close()
        assert await agent.receive() == Finished(version=60)
        with pytest.raises(PeerLost):
            await agent.receive()
        assert agent.closed
        with pytest.raises(PeerLost):
            agent.post(report(1))

    on_pair(scene)


def test_an_order_to_a_member_that_left_does_not_lose_its_last_words(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        member.send(Finished(version=60))
        member.close()
        try:
            await agent.send(report(1))
        except PeerLost:
            pass  # whether it is known yet depends on timing; what follows must hold in either case
        assert await agent.receive() == Finished(version=60)
        with pytest.raises(PeerLost):
            await agent.receive()

    on_pair(scene)


def test_what_an_agent_said_before_it_left_is_read(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        member.send(report(9))
        await agent.send(Stop(epoch=1, code=3, why="over"))
        await agent.close()
        await agent.close()
        assert await asyncio.to_thread(member.receive, LIMIT_S) == Stop(epoch=1, code=3, why="over")
        with pytest.raises(PeerLost):
            await asyncio.to_thread(member.receive, LIMIT_S)
        with pytest.raises(PeerLost):
            member.send(report(1))

    on_pair(scene)


def test_close_wakes_a_waiting_receiver(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        waiting = threading.Event()

        def wait_for_ever() -> None:
            waiting.set()
            with pytest.raises(PeerLost):
                member.receive()

        waiter = asyncio.create_task(asyncio.to_thread(wait_for_ever))
        await asyncio.to_thread(waiting.wait)
        member.close()
        member.close()
        await waiter
        with pytest.raises(PeerLost):
            member.send(report(1))

    on_pair(scene)


def test_a_cancelled_receive_loses_nothing(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        for rank in range(20):
            pending = asyncio.create_task(agent.receive())
            await asyncio.to_thread(member.send, report(rank))
            pending.cancel()
            done = await asyncio.gather(pending, return_exceptions=True)
            got = done[0] if not isinstance(done[0], BaseException) else await agent.receive()
            assert got == report(rank)

    on_pair(scene)


def test_threads_do_not_mix_their_messages(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        def talk(code: int) -> None:
            for rank in range(5):
                member.send(MemberExited(member="m" * 50_000, rank=rank, code=code, signal=0))

        talkers = [asyncio.create_task(asyncio.to_thread(talk, code)) for code in range(3)]
        heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(15):
            got = await agent.receive()
            assert isinstance(got, MemberExited) and got.member == "m" * 50_000
            heard[got.code].append(got.rank)
        await asyncio.gather(*talkers)
        assert heard == {code: list(range(5)) for code in range(3)}

    on_pair(scene)


def test_a_message_that_is_too_long_is_refused_and_the_link_lives(on_pair: Any) -> None:
    async def scene(member: MemberWire, agent: AgentWire) -> None:
        with pytest.raises(RecordError):
            member.send(MemberExited(member="m", rank=1, code=0, signal=9, private={1: b"x" * 5_000_000}))
        member.send(report(1))
        assert await agent.receive() == report(1)

    on_pair(scene)


def test_a_frozen_member_does_not_hold_up_the_agent() -> None:
    async def scene() -> None:
        async with socket_pair() as (member, agent):
            with pytest.raises(TransportError, match="has not read"):
                for _ in range(MAX_UNREAD_BYTES // 4_000_000 + 2):
                    agent.post(BIG)
            assert not agent.closed
            assert await asyncio.to_thread(member.receive, LIMIT_S) == BIG

    run(scene())


def test_foreign_bytes_end_the_link_with_a_reason() -> None:
    async def scene(packet: bytes, kind: type[Exception]) -> None:
        seen: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        async def on_connect(peer: AgentWire) -> None:
            with pytest.raises(kind) as caught:
                await peer.receive()
            seen.set_result(caught.value)

        server = await serve(fresh_name(), on_connect)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + server.name)
            stranger.send(packet)
            await seen
        await server.close()

    run(scene(b"GET / HTTP/1.1\r\n", TransportError))
    run(scene(b"SK\x01\x00\x01\x00\x00\x00\x00\x00\x00\x00\xc1", RecordError))


def test_a_failing_handler_is_told_to_the_loop_and_the_server_goes_on() -> None:
    async def scene() -> None:
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.set_result(context))
        visits = iter(range(2))

        async def on_connect(peer: AgentWire) -> None:
            if next(visits) == 0:
                raise ZeroDivisionError("a bug")
            await peer.send(report(1))

        server = await serve(fresh_name(), on_connect)
        first = await asyncio.to_thread(Wire.connect, server.name)
        assert isinstance((await told)["exception"], ZeroDivisionError)
        second = await asyncio.to_thread(Wire.connect, server.name)
        assert await asyncio.to_thread(second.receive, LIMIT_S) == report(1)
        first.close()
        second.close()
        await server.close()
        await server.close()

    run(scene())


def test_a_name_in_use_nobody_there_and_nonsense_names() -> None:
    name = fresh_name()
    with listen_unix(name):
        with pytest.raises(EnvironmentProblem, match="another process listens"):
            listen_unix(name)
    with pytest.raises(EnvironmentProblem, match="no agent answers.*keepstep run"):
        Wire.connect(name)
    for bad in ("", "a\0b", "x" * 200):
        with pytest.raises(UsageError):
            Wire.connect(bad)


def test_another_user_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert peer_pid(ours) == os.getpid()
        with pytest.raises(EnvironmentProblem, match=f"user {os.getuid()}, not {os.getuid() + 1}"):
            peer_pid(ours, owner=os.getuid() + 1)
