"""A copy goes to its holder and back whole, or not at all; damage on the way is seen by the hashes (G-17: bounds)."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from keepstep.errors import PeerLost, TornRecord
from keepstep.training.host_memory import Block
from keepstep.training.manifest import Entry, Image, Manifest
from keepstep.training.mirror_wire import Offer, ask_copy, read_copy_request, receive_state, send_private_of, send_state
from keepstep.training.shelf import KeptState, Shelf


def state(sizes: tuple[int, ...] = (3, 0, 5_000_000, 70)) -> tuple[Manifest, Block]:
    """A state with small, empty and large entries."""
    entries = tuple(Entry(f"e{i}", "uint8", (size,), size) for i, size in enumerate(sizes))
    block = Block(sum(sizes))
    block.view[:] = bytes(range(256)) * (len(block.view) // 256) + bytes(len(block.view) % 256)
    return Manifest(entries, b"tree", "key"), block


class Holder:
    """The receiving end in a thread."""

    def __init__(self, sock: socket.socket, *, refuses: bool = False) -> None:
        self.shelf = Shelf()
        self.error: Exception | None = None
        self.refuses = refuses
        self._sock = sock
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _admit(self, offer: Offer, manifest: Manifest) -> Block | None:
        return None if self.refuses else self.shelf.room(offer.rank, manifest.nbytes)

    def _run(self) -> None:
        with self._sock:
            try:
                while receive_state(self._sock, admit=self._admit, settle=self.shelf.put):
                    pass
            except (PeerLost, TornRecord, OSError) as error:
                self.error = error


def offer(manifest: Manifest, version: int = 7) -> Offer:
    return Offer(3, version, 0, manifest.encode(), b"mine")


def test_two_versions_arrive_whole_and_go_back() -> None:
    manifest, block = state()
    ours, theirs = socket.socketpair()
    holder = Holder(theirs)
    gaps = []
    for version in (7, 8):
        digest = send_state(ours, offer(manifest, version), block=block, gap=lambda: gaps.append(1))
    ours.close()
    holder.thread.join()
    assert holder.error is None and holder.shelf.versions(3) == (7, 8) and len(gaps) >= 10
    kept = holder.shelf.get(3, 8)
    assert kept is not None and kept.digest == digest == kept.image().digest and kept.private == b"mine"
    assert kept.image().digest == Image(manifest, kept.views()).digest
    assert bytes(kept.block.view) == bytes(block.view)
    assert kept.announced().nbytes == manifest.nbytes


def test_a_holder_that_refuses_stops_nothing() -> None:
    manifest, block = state()
    ours, theirs = socket.socketpair()
    holder = Holder(theirs, refuses=True)
    with pytest.raises(PeerLost, match="does not take it"):
        send_state(ours, offer(manifest), block=block, gap=lambda: None)
    ours.close()
    holder.thread.join()
    assert holder.shelf.versions(3) == ()


def test_a_copy_that_changes_on_the_way_is_not_kept() -> None:
    """The bytes change between their hash and their sending: as memory that goes bad would make it."""
    manifest, block = state((100,))
    ours, theirs = socket.socketpair()
    holder = Holder(theirs)

    class Bad:
        view = memoryview(bytes(100))

    class Sock:
        """Flips a byte of what is sent as data."""

        def sendall(self, data) -> None:
            ours.sendall(bytes(data) if len(data) != 100 else b"\x01" + bytes(data)[1:])

        def __getattr__(self, name):
            return getattr(ours, name)

    with pytest.raises((PeerLost, OSError)):
        send_state(Sock(), offer(manifest), block=Bad(), gap=lambda: None)  # type: ignore[arg-type]
    holder.thread.join()
    ours.close()
    assert isinstance(holder.error, TornRecord) and holder.shelf.versions(3) == ()


def test_a_sender_that_dies_leaves_the_version_before() -> None:
    manifest, block = state((300, 300))
    ours, theirs = socket.socketpair()
    holder = Holder(theirs)
    send_state(ours, offer(manifest), block=block, gap=lambda: None)

    def die() -> None:
        ours.shutdown(socket.SHUT_RDWR)

    with pytest.raises((PeerLost, OSError)):
        send_state(ours, offer(manifest, 8), block=block, gap=die)
    holder.thread.join()
    ours.close()
    assert isinstance(holder.error, PeerLost) and holder.shelf.versions(3) == (7,)


@pytest.mark.parametrize("data", [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc", b"\1"])
def test_nonsense_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    holder = Holder(theirs)
    ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    holder.thread.join()
    ours.close()
    assert holder.shelf.all() == []
    assert isinstance(holder.error, TornRecord) or len(data) == 1


def test_a_joiner_hears_at_once_that_a_copy_is_not_there() -> None:
    manifest, block = state((10,))
    for kept in (None, KeptState(3, 7, 0, manifest, "", b"own", block)):
        ours, theirs = socket.socketpair()
        with ours, theirs:

            def answer(theirs=theirs, kept=kept) -> None:
                assert read_copy_request(theirs) == (3, 7)
                send_private_of(theirs, kept)

            thread = threading.Thread(target=answer)
            thread.start()
            if kept is None:
                with pytest.raises(PeerLost, match="not there"):
                    ask_copy(ours, 3, version=7)
            else:
                assert ask_copy(ours, 3, version=7) == b"own"
            thread.join()


def test_a_request_of_another_kind_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(bytes(16))
        with pytest.raises(TornRecord):
            read_copy_request(theirs)
