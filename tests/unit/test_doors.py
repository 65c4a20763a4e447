"""The hello of members: both sides prove the secret; wrong, slow and foreign callers cost nothing (G: fencing)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from silent_port import silent_port

from keepstep.errors import Fenced, GroupAborted, HelloCut, PeerLost
from keepstep.records.messages import Address
from keepstep.training.authentication import Greeting, Verdict, greet
from keepstep.training.connecting import connect_address
from keepstep.training.dialing import again
from keepstep.training.doors import Doors

SECRET = b"s" * 32


class Desk:
    """A host that notes what it gets; `verdicts` are given out in turn, then WELCOME."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.judged: list[Greeting] = []
        self.got: list[tuple[Greeting, socket.socket, int]] = []
        self.withdrawn_calls: list[Greeting] = []
        self.news = threading.Semaphore(0)

    def judge(self, greeting: Greeting) -> Verdict:
        self.judged.append(greeting)
        verdict = self.verdicts.pop(0) if self.verdicts else Verdict.WELCOME
        if verdict is Verdict.PARKED:
            self.news.release()
        return verdict

    def deliver(self, greeting: Greeting, sock: socket.socket, *, memory_fd: int) -> None:
        self.got.append((greeting, sock, memory_fd))
        self.news.release()

    def withdrawn(self, greeting: Greeting) -> None:
        self.withdrawn_calls.append(greeting)
        self.news.release()


@pytest.fixture
def desk() -> Iterator[tuple[Desk, Doors]]:
    host, doors = Desk(), Doors("b", "node1")
    doors.open(host, SECRET)
    yield host, doors
    doors.close()
    for _, sock, memory_fd in host.got:
        sock.close()
        if memory_fd >= 0:
            os.close(memory_fd)


def caller(target: str = "b", *, kind: str = "link", shared: bool = False) -> Greeting:
    return Greeting(kind, "a", 0, target, 1, "world", 0, shared)


def own(node: str) -> Address:
    return Address("a", node, "nowhere", "127.0.0.1", 1)


def call(doors: Doors, node: str = "node1", **given: object) -> tuple[Verdict, socket.socket]:
    sock = connect_address(own(node), doors.address, timeout_s=5)
    options = {"secret": SECRET, "timeout_s": 10.0, **given}
    greeting = options.pop("greeting", caller())
    try:
        return greet(sock, greeting, **options), sock  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise


@pytest.mark.parametrize(("node", "family"), [("node1", socket.AF_UNIX), ("node2", socket.AF_INET)])
def test_a_proven_call_is_delivered_and_carries_data(desk: tuple[Desk, Doors], node: str, family: int) -> None:
    host, doors = desk
    verdict, sock = call(doors, node)
    assert verdict is Verdict.WELCOME
    assert host.news.acquire(timeout=10)
    greeting, other, memory_fd = host.got[0]
    assert (greeting, other.family, memory_fd) == (caller(), family, -1)
    sock.sendall(b"after the hello")
    assert other.recv(100) == b"after the hello"
    sock.close()


def test_shared_memory_comes_along(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk
    memory_fd = os.memfd_create("test")
    os.ftruncate(memory_fd, 4096)
    _, sock = call(doors, memory_fd=memory_fd, greeting=caller(shared=True))
    assert host.news.acquire(timeout=10)
    assert os.fstat(host.got[0][2]).st_ino == os.fstat(memory_fd).st_ino
    sock.close()
    os.close(memory_fd)


def test_a_wrong_secret_is_dropped_by_the_acceptor(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk
    with pytest.raises(PeerLost, match="refused"):
        call(doors, secret=b"x" * 32)
    assert host.judged == []


def test_the_dialer_wants_a_proof_too() -> None:
    """A listener that does not know the secret cannot pass for a member."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"KSH1" + bytes(32))
    theirs.sendall(bytes([0]) + bytes(32))
    with pytest.raises(PeerLost, match="could not prove"):
        greet(ours, caller(), secret=SECRET, timeout_s=5)
    ours.close()
    theirs.close()


def test_a_call_meant_for_another_member_is_refused(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk
    with pytest.raises(Fenced, match="roster"):
        call(doors, greeting=caller("somebody else"))
    assert host.judged == []


@pytest.mark.parametrize(("verdict", "error"), [(Verdict.STALE, "older generation"), (Verdict.STRANGER, "roster")])
def test_fenced_callers_are_told(desk: tuple[Desk, Doors], verdict: Verdict, error: str) -> None:
    host, doors = desk
    host.verdicts = [verdict]
    with pytest.raises(Fenced, match=error):
        call(doors)
    assert host.got == []


def test_a_parked_caller_waits_for_the_host(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk
    host.verdicts = [Verdict.PARKED]
    result: list[Verdict] = []
    thread = threading.Thread(target=lambda: result.append(call(doors)[0]))
    thread.start()
    assert host.news.acquire(timeout=10)
    assert result == []
    doors.reconsider()
    thread.join(10)
    assert result == [Verdict.WELCOME]


def test_an_interrupt_ends_a_parked_call_and_the_host_sees_no_connection(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk
    host.verdicts = [Verdict.PARKED]
    interrupt_fd = os.eventfd(0)
    errors: list[BaseException] = []

    def dial() -> None:
        try:
            call(doors, interrupt_fd=interrupt_fd)
        except GroupAborted as error:
            errors.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    assert host.news.acquire(timeout=10)
    os.eventfd_write(interrupt_fd, 1)
    thread.join(10)
    os.close(interrupt_fd)
    assert len(errors) == 1
    doors.reconsider()
    assert call(doors)[0] is Verdict.WELCOME  # the doors still work
    assert host.news.acquire(timeout=10)
    assert [greeting for greeting, _, _ in host.got] == [caller()]


def test_an_interrupt_ends_a_call_that_nobody_answers() -> None:
    interrupt_fd = os.eventfd(0)
    with silent_port() as port, ThreadPoolExecutor(1) as pool:
        other = Address("b", "node2", "nowhere", "127.0.0.1", port)
        calling = pool.submit(connect_address, own("node1"), other, timeout_s=60, interrupt_fd=interrupt_fd)
        os.eventfd_write(interrupt_fd, 1)
        with pytest.raises(GroupAborted):
            calling.result(timeout=30)
    os.close(interrupt_fd)


def test_a_welcome_caller_that_hangs_up_is_withdrawn(desk: tuple[Desk, Doors]) -> None:
    host, doors = desk

    class Silent(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            if data != b"C":
                super().sendall(data, flags)

    plain = connect_address(own("node1"), doors.address, timeout_s=5)
    with Silent(fileno=plain.detach()) as sock:
        assert greet(sock, caller(), secret=SECRET, timeout_s=5) is Verdict.WELCOME
    assert host.news.acquire(timeout=10)
    assert (host.withdrawn_calls, host.got) == ([caller()], [])


def test_many_silent_callers_do_not_keep_a_good_one_out(desk: tuple[Desk, Doors]) -> None:
    _, doors = desk
    silent = [connect_address(own("node1"), doors.address, timeout_s=5) for _ in range(300)]
    verdict, sock = call(doors)
    assert verdict is Verdict.WELCOME
    for other in [*silent, sock]:
        other.close()


@given(st.binary(min_size=1, max_size=300))
def test_noise_is_dropped(noise: bytes) -> None:
    host, doors = Desk(), Doors("b", "node1")
    doors.open(host, SECRET)
    with connect_address(own("node1"), doors.address, timeout_s=5) as sock:
        sock.settimeout(10)
        sock.sendall(noise)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
    doors.close()
    assert (host.judged, host.got) == ([], [])


def test_a_call_cut_in_mid_hello_is_made_again_but_not_for_ever():
    tries = []

    def call(cut: int) -> str:
        tries.append(cut)
        if len(tries) <= cut:
            raise HelloCut("the hello was refused")
        return "through"

    assert again(lambda: call(2)) == "through" and len(tries) == 3
    tries.clear()
    with pytest.raises(HelloCut):
        again(lambda: call(9))
    assert len(tries) == 3
