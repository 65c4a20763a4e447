"""Training never waits for the member that holds a mirror, and only copies of the present generation count (G-25)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from test_fabric import World, until

from keepstep.errors import PeerLost
from keepstep.records.messages import Address
from keepstep.training.manifest import Entry, Image, Manifest
from keepstep.training.mirror_holder import PRIVATE_FRAME, MirrorHolder
from keepstep.training.mirror_sender import MirrorSender, PrivateSender
from keepstep.training.mirror_wire import Offer, send_state
from keepstep.training.shelf import Shelf
from keepstep.training.state_copy import StateCopy
from keepstep.training.statewire import receive_exactly

SIZE = 3_000_000
PRIVATE = 100_000
MANY = 200
MANIFEST = Manifest((Entry("parameters.a", "uint8", (SIZE,), SIZE),), b"", "key")


@pytest.fixture
def world() -> Iterator[World]:
    """Two members on two nodes."""
    made = World("ab")
    yield made
    made.close()


def copy_of(version: int, own: Shelf) -> StateCopy:
    """A state that says which version it is."""
    image = Image(MANIFEST, [memoryview(bytearray([version]) * SIZE)])
    return StateCopy(image, own.room(0, SIZE), version=version, private=b"own")


@pytest.fixture
def own() -> Shelf:
    return Shelf()


@pytest.fixture
def sender(world: World, own: Shelf) -> Iterator[MirrorSender]:
    """Of rank 0, whose mirror rank 1 holds."""
    made = MirrorSender(world.fabrics[0], own, place=lambda: 1)
    yield made
    made.close()


def test_copies_are_stored_one_after_the_other(world: World, own: Shelf, sender: MirrorSender) -> None:
    holder = MirrorHolder(world.fabrics[1])
    for version in (1, 2, 3):
        sender.submit(copy_of(version, own), generation=1, send=True)
        until(lambda version=version: sender.stored == version)
    assert own.versions(0) == holder.shelf.versions(0) == (2, 3)
    assert sender.bytes_sent == 3 * SIZE
    kept = holder.shelf.get(0, 3)
    assert kept is not None and bytes(kept.block.view) == bytes([3]) * SIZE


def test_a_copy_does_not_wait_for_a_holder_that_stands_still(world: World, own: Shelf, sender: MirrorSender) -> None:
    """The holder has taken the call and reads nothing, as one that is frozen."""
    called: list[socket.socket] = []
    world.fabrics[1].serve("mirror", called.append)
    sender.submit(copy_of(1, own), generation=1, send=True)
    until(lambda: bool(called))
    second = copy_of(2, own)
    sender.submit(second, generation=1, send=True)
    until(lambda: second.done)
    assert own.versions(0) == (1, 2) and sender.stored == -1
    called[0].close()


def test_a_change_cuts_off_what_is_being_sent(world: World, own: Shelf, sender: MirrorSender) -> None:
    called: list[socket.socket] = []
    world.fabrics[1].serve("mirror", called.append)
    sender.submit(copy_of(1, own), generation=1, send=True)
    until(lambda: bool(called))
    world.install(2)
    holder = MirrorHolder(world.fabrics[1])
    sender.forget()
    sender.submit(copy_of(2, own), generation=2, send=True)
    until(lambda: sender.stored == 2)
    assert holder.shelf.versions(0) == (2,)
    with called[0] as sock:
        assert sock.recv(1 << 20, socket.MSG_WAITALL)[4:] and sock.recv(1) == b""


def after(first: Callable[[], object]) -> Callable[[], None]:
    """Does `first` at the first call."""
    todo = [first]

    def call() -> None:
        while todo:
            todo.pop()()

    return call


def _move(world: World, holder: MirrorHolder) -> None:
    world.install(2)


def _change(world: World, holder: MirrorHolder) -> None:
    world.install(2)
    holder.run_on(7)


def _ask(world: World, holder: MirrorHolder) -> None:
    holder.freeze()


@pytest.mark.parametrize("meanwhile", [_move, _change, _ask])
def test_a_copy_that_is_late_is_not_kept(world: World, own: Shelf, meanwhile) -> None:
    """Version 8 is still on its way when the members change and go back to version 7, or the holder is asked."""
    holder = MirrorHolder(world.fabrics[1])
    block = copy_of(0, own).block
    offers = [Offer(0, version, 1, MANIFEST.encode(), b"") for version in (7, 8)]
    with world.fabrics[0].dial(world.roster[1], "mirror") as sock:
        send_state(sock, offers[0], block=block, gap=lambda: None)
        with pytest.raises((PeerLost, OSError)):
            send_state(sock, offers[1], block=block, gap=after(lambda: meanwhile(world, holder)))
    assert holder.shelf.versions(0) == (7,)
    if meanwhile is _ask:
        return
    again = Offer(0, 7, 2, MANIFEST.encode(), b"")
    with world.fabrics[0].dial(world.roster[1], "mirror") as sock:
        send_state(sock, again, block=block, gap=lambda: None)
    assert [(kept.version, kept.generation) for kept in holder.shelf.all()] == [(7, 2)]


class Reader:
    """Whoever holds what others alone know; reads only while `open`. The first `cuts` connections are hung up."""

    def __init__(self, *, cuts: int = 0) -> None:
        self.open = threading.Event()
        self.calls = 0
        self.seen: dict[int, bytes] = {}
        self._cuts = cuts

    def __call__(self, sock: socket.socket) -> None:
        self.calls += 1
        with sock:
            if self.calls <= self._cuts:
                return
            self.open.wait()
            try:
                while True:
                    _, _, version, length = PRIVATE_FRAME.unpack(receive_exactly(sock, PRIVATE_FRAME.size))
                    self.seen[version] = bytes(receive_exactly(sock, length))
            except (PeerLost, OSError):
                return


@pytest.fixture
def private(world: World) -> Iterator[PrivateSender]:
    made = PrivateSender(world.fabrics[0], place=lambda: 1)
    yield made
    made.close()


def own_state(version: int) -> bytes:
    return bytes([version % 256]) * PRIVATE


def tell_until(private: PrivateSender, reached: Callable[[], bool], *, first: int) -> None:
    """Tell one version after the other, from `first` on, until that is so."""
    version = first

    def told() -> bool:
        nonlocal version
        private.tell(version, own_state(version))
        version += 1
        return reached()

    until(told)


def test_a_holder_that_reads_slowly_misses_versions_and_no_more(world: World, private: PrivateSender) -> None:
    reader = Reader()
    world.fabrics[1].serve("private", reader)
    tell_until(private, lambda: reader.calls > 0, first=0)
    for version in range(2000, 2000 + MANY):
        private.tell(version, own_state(version))
    reader.open.set()
    tell_until(private, lambda: max(reader.seen, default=0) > 3000, first=3000)
    assert reader.calls == 1
    assert sum(2000 <= version < 3000 for version in reader.seen) < MANY, "nothing had to be left out"
    assert all(data == own_state(version) for version, data in reader.seen.items())


def test_a_connection_that_breaks_is_made_again(world: World, private: PrivateSender) -> None:
    reader = Reader(cuts=2)
    reader.open.set()
    world.fabrics[1].serve("private", reader)
    tell_until(private, lambda: bool(reader.seen), first=0)
    assert reader.calls == 3


def test_a_connection_over_a_way_that_swallows_breaks_in_time(world: World, private: PrivateSender) -> None:
    """Else the kernel would try for a quarter of an hour, and the holder would know nothing new meanwhile."""
    reader = Reader()
    reader.open.set()
    world.fabrics[1].serve("private", reader)
    tell_until(private, lambda: bool(reader.seen), first=0)
    assert private._sock is not None
    assert 0 < private._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_a_holder_that_did_not_answer_is_called_again(
    world: World, private: PrivateSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, tries = Reader(), []
    reader.open.set()
    world.fabrics[1].serve("private", reader)

    def resolve(rank: int, timeout_s: float) -> Address:
        tries.append(rank)
        if len(tries) == 1:
            raise PeerLost("nobody is there yet")
        return world.roster[rank]

    monkeypatch.setattr(world.fabrics[0].directory, "resolve", resolve)
    tell_until(private, lambda: bool(reader.seen), first=1)
    assert tries == [1, 1]
