"""A joiner's side of following: a thread takes what the leaver sends, the training thread makes it its own state."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from keepstep.errors import PeerLost, RecordError, TornRecord
from keepstep.training.followwire import (
    FinalDigest,
    Follow,
    HandedOver,
    NothingToFollow,
    SnapshotHead,
    UpdateHead,
    receive_frame,
    send_frame,
    wrong_chunk,
)
from keepstep.training.manifest import Manifest, decode_manifest
from keepstep.training.statewire import receive_into, set_timeout

__all__ = ["Broken", "Event", "Follower", "SnapshotHere", "UpdateHere", "WantsRoom"]

_MOST_WAITING = 2
_TIMEOUT_S = 3600.0


class WantsRoom(NamedTuple):
    """A state of this shape is about to come: `Follower.fill` says where to."""

    manifest: Manifest


class SnapshotHere(NamedTuple):
    """The whole state of `version` is where it belongs; `behind` as in `SnapshotHead`."""

    version: int
    nbytes: int
    behind: int


class UpdateHere(NamedTuple):
    """An update and its gradients."""

    head: UpdateHead
    gradients: bytearray


class Broken(NamedTuple):
    """The stream has ended, because of `why`."""

    why: str


Event = WantsRoom | SnapshotHere | UpdateHere | NothingToFollow | HandedOver | FinalDigest | Broken


class Follower:
    """Follows the leaver of move `number` over `sock`. `wake()` is called in a thread when `take` has something.

    `most` bounds the bytes of one update.
    """

    def __init__(self, sock: socket.socket, number: int, *, most: int, wake: Callable[[], None]) -> None:
        self._sock, self._number, self._most = sock, number, most
        self._wake = wake
        self._events: queue.Queue[Event] = queue.Queue(_MOST_WAITING)
        self._room: queue.Queue[Sequence[memoryview]] = queue.Queue(1)
        self._pool: list[bytearray] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keepstep-follow", daemon=True)
        self._thread.start()

    def take(self) -> Event | None:
        """The next event, or None if there is none now."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def fill(self, views: Sequence[memoryview]) -> None:
        """Where the bytes of a snapshot go."""
        self._room.put(views)

    def give_back(self, gradients: bytearray) -> None:
        """The gradients of an update are not needed any more."""
        self._pool[:] = [gradients]

    def close(self) -> None:
        """Hang up. Nothing is written to anybody's memory afterwards. Idempotent."""
        self._closing = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        while self._thread.is_alive():
            self.take()
            if self._room.empty():
                self._room.put([])
            self._thread.join(0.01)
        self._sock.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            set_timeout(self._sock, _TIMEOUT_S)
            send_frame(self._sock, Follow(self._number))
            while not self._closing:
                self._receive()
        except (OSError, PeerLost, RecordError) as error:
            self._tell(Broken(str(error)))

    def _receive(self) -> None:
        said, nbytes = receive_frame(self._sock, most=self._most)
        if isinstance(said, SnapshotHead):
            self._tell(self._snapshot(said, nbytes))
        elif isinstance(said, UpdateHead):
            self._tell(self._update(said, nbytes))
        elif isinstance(said, (NothingToFollow, HandedOver, FinalDigest)):
            self._tell(said)
        else:
            raise TornRecord("a leaver does not follow")

    def _tell(self, event: Event) -> None:
        while not self._closing:
            try:
                self._events.put(event, timeout=0.1)
                self._wake()
                return
            except queue.Full:
                continue

    def _snapshot(self, head: SnapshotHead, nbytes: int) -> Event:
        manifest = decode_manifest(head.manifest)
        self._tell(WantsRoom(manifest))
        views = self._room.get()
        if [len(view) for view in views] != [entry.nbytes for entry in manifest.entries]:
            raise TornRecord("the state of the leaver does not fit this member")
        receive_into(self._sock, list(views))
        wrong = wrong_chunk(manifest, head.digests, views=views)
        if wrong:
            raise TornRecord(f"other bytes than announced for {wrong}")
        return SnapshotHere(head.version, nbytes, head.behind)

    def _update(self, head: UpdateHead, nbytes: int) -> Event:
        data = self._pool.pop() if self._pool else bytearray()
        if len(data) != nbytes:
            data = bytearray(nbytes)
        receive_into(self._sock, [memoryview(data)])
        if xxhash.xxh3_64_digest(data) != head.digest:
            raise TornRecord(f"other gradients than announced for version {head.version}")
        return UpdateHere(head, data)
