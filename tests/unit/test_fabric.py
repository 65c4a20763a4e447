"""Fabrics of several members in one process: links, modes, fencing, and that a change keeps what it can."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from silent_port import silent_port

from keepstep.errors import Fenced, PeerLost
from keepstep.records.messages import Address
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Mode, Place, connect_fabric, current_fabric

SECRET = b"k" * 32
NODES = {"shared": "aaaa", "tcp": "abcd", "mixed": "aabb"}


def until(reached: Callable[[], bool]) -> None:
    """Waits for a background thread to bring something about."""
    for _ in range(2000):
        if reached():
            return
        threading.Event().wait(0.005)
    assert reached()


class World:
    """Members of a job, all in this process."""

    def __init__(self, nodes: Sequence[str], *, protected: bool = True) -> None:
        self.protected = protected
        self.lost: list[tuple[int, int]] = []
        self.doors = [Doors(f"m{rank}", node) for rank, node in enumerate(nodes)]
        self.roster = {rank: doors.address for rank, doors in enumerate(self.doors)}
        self.fabrics = [self.member(rank, doors, 1) for rank, doors in enumerate(self.doors)]

    def member(self, rank: int, doors: Doors, generation: int) -> Fabric:
        return Fabric(
            doors,
            Place(rank, len(self.roster), generation),
            secret=SECRET,
            directory=RosterDirectory(self.roster),
            protected=self.protected,
            on_loss=lambda gone: self.lost.append((rank, gone)),
        )

    def everywhere(self, action: Callable[[Fabric], object]) -> list[object]:
        with ThreadPoolExecutor(len(self.fabrics)) as pool:
            return list(pool.map(action, self.fabrics))

    def agree(self) -> list[object]:
        return self.everywhere(Fabric.agreement)

    def replace(self, rank: int, node: str, generation: int) -> Fabric:
        """Puts a new member, still in LOCAL mode, in the place of `rank`; returns the old one."""
        doors = Doors(f"m{rank}.{generation}", node)
        self.roster = {**self.roster, rank: doors.address}
        old, self.fabrics[rank] = self.fabrics[rank], self.member(rank, doors, generation - 1)
        self.fabrics[rank].go_local()
        return old

    def install(self, generation: int, *, renew: bool = False) -> None:
        self.everywhere(lambda fabric: fabric.install(generation, self.roster, renew=renew))

    def close(self) -> None:
        for fabric in self.fabrics:
            fabric.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(nodes: Sequence[str] = "aaaa", *, protected: bool = True) -> World:
        made.append(World(nodes, protected=protected))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_all_members_agree_over_every_transport(worlds: Callable[..., World], nodes: str) -> None:
    world = worlds(nodes)
    assert world.agree() == [True] * 4
    assert world.agree() == [True] * 4
    assert world.lost == []


def test_one_member_alone_agrees_with_itself(worlds: Callable[..., World]) -> None:
    assert worlds("a").agree() == [True]


def test_a_poisoned_member_does_not_wait(worlds: Callable[..., World]) -> None:
    world = worlds()
    first = world.fabrics[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.agreement)
        until(lambda: len(first.inodes()) > 0 or waiting.running())
        first.poison()
        assert waiting.result(timeout=10) is False
    assert first.mode is Mode.POISONED
    assert first.agreement() is False


def test_a_new_generation_does_not_wait_for_a_call_that_nobody_answers(worlds: Callable[..., World]) -> None:
    """The host of a member is off, and others are calling it: they call its successor at once."""
    world = worlds("ab")
    first = world.fabrics[0]
    with silent_port() as port, ThreadPoolExecutor(2) as pool:
        first.directory.replace({**world.roster, 1: Address("m1", "b", "", "127.0.0.1", port)})
        first.start_watch()
        waiting = [pool.submit(fabric.agreement) for fabric in world.fabrics]
        until(lambda: bool(first._links._dialing))
        for fabric in world.fabrics:
            fabric.poison()
        assert [one.result(timeout=30) for one in waiting] == [False, False]
        world.install(2)
        agreed = [pool.submit(fabric.agreement) for fabric in world.fabrics]
        assert [one.result(timeout=30) for one in agreed] == [True, True]
        until(lambda: ("watch", -1, 1) in first.inodes())
    assert world.lost == []


def test_a_local_member_never_agrees(worlds: Callable[..., World]) -> None:
    fabric = worlds("a").fabrics[0]
    fabric.go_local()
    assert (fabric.mode, fabric.agreement()) == (Mode.LOCAL, False)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_change_keeps_every_link_between_stayers(worlds: Callable[..., World], nodes: str) -> None:
    """G-7: the sockets of stayers are the same ones before and after, by inode; the joiner may sit elsewhere."""
    world = worlds(nodes)
    for fabric in world.fabrics:
        fabric.start_watch()
    assert world.agree() == [True] * 4
    until(lambda: all(("watch", -1, other) in f.inodes() for f in world.fabrics for other in {0, 1, 2, 3} - {f.rank}))
    stayers = world.fabrics[:3]
    before = [{key: inode for key, inode in fabric.inodes().items() if key[2] != 3} for fabric in stayers]
    assert all(before)
    for fabric in stayers:
        fabric.poison()
    old = world.replace(3, "elsewhere", 2)
    world.install(2)
    assert world.agree() == [True] * 4
    for fabric, kept in zip(stayers, before, strict=True):
        now = fabric.inodes()
        assert {key: now.get(key) for key in kept} == kept
    assert all(fabric.mode is Mode.LIVE and fabric.generation == 2 for fabric in world.fabrics)
    old.close()


def cut(inode: int) -> None:
    """Break the connection behind a socket inode of this process, as a network does."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry) == f"socket:[{inode}]":
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError(f"no socket {inode}")


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_broken_link_between_living_members_is_made_anew(worlds: Callable[..., World], nodes: str) -> None:
    world = worlds(nodes)
    for fabric in world.fabrics:
        fabric.start_watch()
    assert world.agree() == [True] * 4
    until(lambda: all(("watch", -1, other) in f.inodes() for f in world.fabrics for other in {0, 1, 2, 3} - {f.rank}))
    before = {key: inode for key, inode in world.fabrics[0].inodes().items() if key[0] != "watch"}
    cut(next(iter(before.values())))
    assert world.agree() != [True] * 4
    for fabric in world.fabrics:
        fabric.poison()
    world.install(2, renew=True)
    assert world.agree() == [True] * 4
    assert not set(before.values()) & set(world.fabrics[0].inodes().values())


def test_many_changes_in_a_row(worlds: Callable[..., World]) -> None:
    world = worlds("aabb")
    assert world.agree() == [True] * 4
    for generation in range(2, 6):
        for fabric in world.fabrics:
            fabric.poison()
        world.replace(generation % 4, "ab"[generation % 2], generation).close()
        world.install(generation)
        assert world.agree() == [True] * 4


def test_members_that_install_late_still_meet(worlds: Callable[..., World]) -> None:
    """A caller of a newer generation waits at the door until we install it, too."""
    world = worlds("abcd")
    for fabric in world.fabrics:
        fabric.poison()
    world.replace(0, "a", 2).close()
    with ThreadPoolExecutor(3) as pool:
        for fabric in world.fabrics[:3]:
            fabric.install(2, world.roster)
        early = [pool.submit(fabric.agreement) for fabric in world.fabrics[:3]]
        world.fabrics[3].install(2, world.roster)
        assert world.fabrics[3].agreement()
        assert [waiting.result(timeout=20) for waiting in early] == [True] * 3


def test_an_older_generation_is_refused(worlds: Callable[..., World]) -> None:
    """G-8: a member that slept through a change is told that its place is taken."""
    world = worlds("aa")
    for fabric in world.fabrics:
        fabric.poison()
    old = world.replace(1, "a", 2)
    world.install(2)
    for fabric in world.fabrics:
        fabric.serve("state", socket.socket.close)
    with pytest.raises(Fenced, match="older generation"):
        old.dial(world.roster[0], "state")
    old.close()


def test_a_stranger_with_the_secret_gets_no_link(worlds: Callable[..., World]) -> None:
    world = worlds("aa")
    stranger = world.member(1, Doors("stranger", "a"), 1)
    refused = threading.Event()
    stranger.on_loss = lambda rank: refused.set() if rank == -1 else None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stranger.agreement)
        assert refused.wait(20)
        assert waiting.result(timeout=20) is False
    stranger.close()
    assert world.agree() == [True, True]


def test_served_connections_reach_their_handler(worlds: Callable[..., World]) -> None:
    world = worlds("ab")

    def echo(sock: socket.socket) -> None:
        with sock:
            sock.sendall(sock.recv(100)[::-1])

    world.fabrics[1].serve("state", echo)
    with world.fabrics[0].dial(world.roster[1], "state") as sock:
        sock.sendall(b"abc")
        assert sock.recv(100) == b"cba"
    with pytest.raises(PeerLost, match="does not serve"):
        world.fabrics[1].dial(world.roster[0], "state")


def test_a_good_bye_is_not_a_loss(worlds: Callable[..., World]) -> None:
    world = worlds("aabb")
    for fabric in world.fabrics:
        fabric.start_watch()
    assert world.agree() == [True] * 4
    until(lambda: all(("watch", -1, 0) in fabric.inodes() for fabric in world.fabrics[1:]))
    world.fabrics[0].close()
    until(lambda: all(fabric.left == {0} for fabric in world.fabrics[1:]))
    assert world.lost == []
    assert [fabric.mode for fabric in world.fabrics[1:]] == [Mode.LIVE] * 3


def test_an_unreachable_member_is_a_loss(worlds: Callable[..., World]) -> None:
    world = worlds("aaa")
    gone = Address("m2", "b", "x", "127.0.0.1", 1)  # nobody listens there
    world.fabrics[0].install(2, {**world.roster, 2: gone})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.fabrics[0].agreement)
        assert waiting.result(timeout=20) is False
    assert (0, 2) in world.lost


def test_the_fabric_of_the_process(worlds: Callable[..., World]) -> None:
    fabric = worlds("a").fabrics[0]
    assert current_fabric() is None
    connect_fabric(fabric)
    assert current_fabric() is fabric
    fabric.close()
    assert current_fabric() is None
