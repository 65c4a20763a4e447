"""The link between controller and agent: one contract over websockets and in memory, then what only sockets have."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import ConnectionClosed

from keepstep.errors import (
    EnvironmentProblem,
    MembershipError,
    PeerLost,
    RecordError,
    TransportError,
    UsageError,
)
from keepstep.records.messages import MemberExited, PeerLostReport
from keepstep.store.challenge import Seals, proof, proves
from keepstep.store.remote import MAX_UNSENT_BYTES, connect_remote, serve_remote
from keepstep.store.remote_peer import Envelope, RemotePeer, decode_envelope, encode_envelope
from keepstep.store.remote_twin import remote_pair

LIMIT_S = 30.0
TOKEN = "a token of many letters"
BIG = Envelope("n2", "n2-1", MemberExited(member="m", rank=1, code=0, signal=9, private={7: b"x" * 4_000_000}))


async def relay(port: int, *, passes: Callable[[bytes], bool]) -> asyncio.Server:
    """A listener that carries bytes to `port` and back, those that `passes` lets through."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if passes(data):
                    sink.write(data)
            sink.close()

        await asyncio.gather(pass_on(reader, there_writer), pass_on(there_reader, writer))

    return await asyncio.start_server(listen, "127.0.0.1", 0)


def report(rank: int) -> Envelope:
    return Envelope("n1", "", PeerLostReport(generation=1, rank=rank))


@asynccontextmanager
async def websocket_pair() -> AsyncIterator[tuple[RemotePeer, RemotePeer]]:
    arrived: asyncio.Future[RemotePeer] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def on_peer(peer: RemotePeer) -> None:
        arrived.set_result(peer)
        await over.wait()

    server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=on_peer)
    agent = await connect_remote(f"127.0.0.1:{server.port}", token=TOKEN)
    try:
        yield await arrived, agent
    finally:
        over.set()
        await agent.close()
        await server.close()


@asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple[RemotePeer, RemotePeer]]:
    yield remote_pair()


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(limited())


@pytest.fixture(params=[websocket_pair, memory_pair], ids=["websocket", "memory"])
def on_pair(request: pytest.FixtureRequest) -> Callable[[Callable[[Any, Any], Awaitable[None]]], None]:
    """Runs an async function of (controller's end, agent's end) over each kind of link."""

    def play(scene: Callable[[RemotePeer, RemotePeer], Awaitable[None]]) -> None:
        async def play_it() -> None:
            async with request.param() as (controller, agent):
                await scene(controller, agent)

        run(play_it())

    return play


async def ignore(peer: RemotePeer) -> None:
    await peer.receive()


def test_envelopes_go_both_ways_in_order(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        sent = [report(1), BIG, report(2)]
        for envelope in sent:
            agent.post(envelope)
            controller.post(envelope)
        assert [await controller.receive() for _ in sent] == sent
        assert [await agent.receive() for _ in sent] == sent
        assert controller.where and agent.where

    on_pair(scene)


def test_what_was_posted_before_close_arrives(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        for rank in range(50):
            agent.post(report(rank))
        await agent.close()
        await agent.close()
        assert [await controller.receive() for _ in range(50)] == [report(rank) for rank in range(50)]
        for peer in (controller, agent):
            with pytest.raises(PeerLost):
                await peer.receive()
            assert peer.closed
            with pytest.raises(PeerLost):
                peer.post(report(1))
            with pytest.raises(PeerLost):
                await peer.send(report(1))

    on_pair(scene)


def test_a_cancelled_receive_loses_nothing(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        for rank in range(20):
            pending = asyncio.create_task(controller.receive())
            await agent.send(report(rank))
            pending.cancel()
            done = await asyncio.gather(pending, return_exceptions=True)
            got = done[0] if not isinstance(done[0], BaseException) else await controller.receive()
            assert got == report(rank)

    on_pair(scene)


def test_many_envelopes_to_a_slow_reader(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        for rank in range(2000):
            agent.post(report(rank))
        assert [await controller.receive() for _ in range(2000)] == [report(rank) for rank in range(2000)]

    on_pair(scene)


def test_an_envelope_that_is_too_long_is_refused_and_the_link_lives(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        with pytest.raises(RecordError, match="at most"):
            agent.post(
                Envelope("n", "", MemberExited(member="m", rank=0, code=0, signal=0, private={0: b"x" * 5_000_000}))
            )
        await agent.send(report(1))
        assert await controller.receive() == report(1)

    on_pair(scene)


def test_a_peer_that_does_not_read_does_not_hold_up_the_other() -> None:
    async def scene() -> None:
        async with websocket_pair() as (controller, _agent):
            with pytest.raises(TransportError, match="has not read"):
                for _ in range(MAX_UNSENT_BYTES // 4_000_000 + 1):
                    controller.post(BIG)
            assert not controller.closed

    run(scene())


def test_wrong_tokens_are_refused_on_both_sides() -> None:
    async def scene() -> None:
        arrived: list[RemotePeer] = []

        async def on_peer(peer: RemotePeer) -> None:
            arrived.append(peer)

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=on_peer)
        with pytest.raises(MembershipError, match="refused the token.*same token"):
            await connect_remote(f"127.0.0.1:{server.port}", token="another")
        assert arrived == []
        await server.close()

        async def impostor(link: ServerConnection) -> None:
            await link.send(b"n" * 32)
            await link.recv()
            await link.send(b"p" * 32)

        async with serve_websocket(impostor, "127.0.0.1", 0) as false_controller:
            port = next(iter(false_controller.sockets)).getsockname()[1]
            with pytest.raises(MembershipError, match="could not prove the token"):
                await connect_remote(f"127.0.0.1:{port}", token=TOKEN)

    run(scene())


def test_the_token_never_travels() -> None:
    async def scene() -> None:
        heard = bytearray()

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=ignore)

        def hear(data: bytes) -> bool:
            heard.extend(data)
            return True

        tap = await relay(server.port, passes=hear)
        agent = await connect_remote(f"127.0.0.1:{tap.sockets[0].getsockname()[1]}", token=TOKEN)
        await agent.send(report(1))
        await agent.close()
        tap.close()
        await server.close()
        assert len(heard) > 200 and TOKEN.encode() not in heard

    run(scene())


def test_a_link_answers_while_it_stands(on_pair: Any) -> None:
    async def scene(controller: RemotePeer, agent: RemotePeer) -> None:
        assert await agent.answers(LIMIT_S) and await controller.answers(LIMIT_S)
        await controller.close()
        assert not await agent.answers(LIMIT_S)

    on_pair(scene)


def test_a_way_that_swallows_gives_no_answer_though_the_link_stands() -> None:
    async def scene() -> None:
        swallows = asyncio.Event()

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=ignore)
        way = await relay(server.port, passes=lambda data: not swallows.is_set())
        agent = await connect_remote(f"127.0.0.1:{way.sockets[0].getsockname()[1]}", token=TOKEN)
        assert await agent.answers(LIMIT_S)
        swallows.set()
        assert not await agent.answers(0.1)
        assert not agent.closed
        await agent.close()
        way.close()
        await server.close()

    run(scene())


def test_a_frame_without_its_seal_ends_the_link() -> None:
    async def scene() -> None:
        ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        async def on_peer(peer: RemotePeer) -> None:
            try:
                await peer.receive()
            except TransportError as error:
                ended.set_result(error)

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=on_peer)
        async with connect(f"ws://127.0.0.1:{server.port}") as link:
            nonces = await link.recv(decode=False) + b"c" * 32
            await link.send(b"c" * 32 + proof(TOKEN, b"connects", nonces=nonces))
            assert proves(await link.recv(decode=False), TOKEN, part=b"listens", nonces=nonces)
            await link.send(b"s" * 16 + encode_envelope(report(1)))
            assert "seal" in str(await ended)
        await server.close()

    run(scene())


@pytest.mark.parametrize("answer", [b"", b"c" * 20, b"c" * 64, b"c" * 70])
def test_nonsense_in_the_handshake_never_reaches_the_controller(answer: bytes) -> None:
    async def scene() -> None:
        arrived: list[RemotePeer] = []

        async def on_peer(peer: RemotePeer) -> None:
            arrived.append(peer)

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=on_peer)
        async with connect(f"ws://127.0.0.1:{server.port}") as link:
            await link.recv()
            await link.send(answer)
            with pytest.raises(ConnectionClosed):
                await link.recv()
            assert link.close_code == 4401
        await server.close()
        assert arrived == []

    run(scene())


def test_places_where_no_controller_is_say_so() -> None:
    async def scene() -> None:
        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=ignore)
        with pytest.raises(EnvironmentProblem, match="port is in use.*another port"):
            await serve_remote("127.0.0.1", server.port, token=TOKEN, on_peer=ignore)
        with pytest.raises(EnvironmentProblem, match="cannot listen"):
            await serve_remote("127.0.0.1", 70000, token=TOKEN, on_peer=ignore)
        await server.close()
        with pytest.raises(EnvironmentProblem, match="Connection refused.*keepstep controller"):
            await connect_remote(f"127.0.0.1:{server.port}", token=TOKEN)

        async def other_program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.7\r\n")
            writer.close()

        other = await asyncio.start_server(other_program, "127.0.0.1", 0)
        with pytest.raises(MembershipError, match="not a keepstep controller"):
            await connect_remote(f"127.0.0.1:{other.sockets[0].getsockname()[1]}", token=TOKEN)
        other.close()

        def refusing(status: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(status.encode())
                writer.close()

            return answer

        for status in ("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", ""):
            closing = await asyncio.start_server(refusing(status), "127.0.0.1", 0)
            with pytest.raises(EnvironmentProblem, match="controller is closing"):
                await connect_remote(f"127.0.0.1:{closing.sockets[0].getsockname()[1]}", token=TOKEN)
            closing.close()
        silent = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        with pytest.raises(EnvironmentProblem, match="no answer within"):
            await connect_remote(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}", token=TOKEN, timeout_s=0.05)
        silent.close()

    run(scene())


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "a/b:1", "u@h:1", "h:٣"]
)
def test_nonsense_addresses_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        run(connect_it(address))


async def connect_it(address: str) -> None:
    await connect_remote(address, token=TOKEN)


def test_a_failing_handler_is_told_to_the_loop() -> None:
    async def scene() -> None:
        told: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.set_result(context))

        async def on_peer(peer: RemotePeer) -> None:
            raise ZeroDivisionError("a bug")

        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=on_peer)
        agent = await connect_remote(f"127.0.0.1:{server.port}", token=TOKEN)
        assert isinstance((await told)["exception"], ZeroDivisionError)
        with pytest.raises(PeerLost):
            await agent.receive()
        await agent.close()
        await server.close()

    run(scene())


def test_closing_the_server_ends_its_links() -> None:
    async def scene() -> None:
        server = await serve_remote("127.0.0.1", 0, token=TOKEN, on_peer=ignore)
        agent = await connect_remote(f"127.0.0.1:{server.port}", token=TOKEN)
        await server.close()
        await server.close()
        with pytest.raises(PeerLost):
            await agent.receive()
        await agent.close()

    run(scene())


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_seals_open_in_order_and_only_so(frames: list[bytes]) -> None:
    listens, connects = Seals(b"key", listens=True), Seals(b"key", listens=False)
    sealed = [listens.seal(frame) for frame in frames]
    assert [connects.open(frame) for frame in sealed] == frames
    for frame in sealed:
        for side in (connects, listens):  # replayed, and turned back on its sender
            with pytest.raises(TransportError):
                side.open(frame)


def test_proofs_follow_their_definition() -> None:
    expected = hmac.new(b"token", b"keepstep 1 connects nonces", hashlib.sha256).digest()
    assert proof("token", b"connects", nonces=b"nonces") == expected
    assert not proves(expected, "token", part=b"listens", nonces=b"nonces")


@given(st.binary(max_size=100))
def test_foreign_envelopes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_envelope(data)
