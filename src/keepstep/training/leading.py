"""A leaver's side of following: its state once, then every update, to the joiner that takes its rank, beside training.

The training thread copies and queues; a thread of its own sends, in the gaps between collectives where there are any.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash
from torch.optim import Optimizer

from keepstep.errors import PeerLost, TornRecord, UnsupportedState
from keepstep.store.machine_memory import free_bytes
from keepstep.training.fabric import Fabric
from keepstep.training.followwire import (
    Description,
    FinalDigest,
    Follow,
    HandedOver,
    NothingToFollow,
    SnapshotHead,
    UpdateHead,
    receive_frame,
    send_frame,
)
from keepstep.training.manifest import Image, Manifest, chunk_digests
from keepstep.training.statewire import set_timeout
from keepstep.training.updates import copy_gradients, gradient_sizes, hyper_parameters, room

__all__ = ["Leading"]

_log = logging.getLogger("keepstep")
_TIMEOUT_S = 60.0
_GAP_LOOK_S = 0.001
_GAP_PATIENCE_S = 0.01
_SPARE_BYTES = 64 * 1024 * 1024
_MOST_SNAPSHOTS = 3
_SHARE = 0.5  # of the memory that is free on the node, for all leavers of one move
_MOST_POOLED = 2


class _Snapshot(NamedTuple):
    version: int
    manifest: Manifest
    parts: Sequence[memoryview]


class _Update(NamedTuple):
    version: int
    groups: bytes
    sizes: tuple[int, ...]
    data: bytearray


_Item = _Snapshot | _Update | NothingToFollow | HandedOver | FinalDigest


class Leading:
    """Serves connections of kind "follow" while a move of this member is being prepared. `waits_for_gaps` may be
    switched off to measure what it is worth. `free` gives the bytes of memory that are free on this node: a copy that
    does not fit in half of them is not made."""

    waits_for_gaps = True

    def __init__(self, fabric: Fabric, *, free: Callable[[], int] = free_bytes) -> None:
        self._fabric = fabric
        self._free = free
        self._change = threading.Condition()
        self._number = 0
        self._leavers = 1
        self._why_not = ""
        self._connected = self._stale = False
        self._snapshots = 0
        self._queue: deque[_Item] = deque()
        self._queued_bytes = self._most_bytes = 0
        self._pool: list[bytearray] = []
        self._pause = threading.Event()
        fabric.serve("follow", self.handle)

    def begin(self, number: int, why_not: str, *, leavers: int = 1) -> None:
        """Offer this member's state to the joiner of move `number`, which has so many `leavers`; `why_not` says that
        its updates cannot be made by others."""
        with self._change:
            self._forget()
            self._number, self._why_not, self._leavers = number, why_not, leavers

    def stop(self) -> None:
        """Nobody follows any more."""
        with self._change:
            self._forget()

    @property
    def ready(self) -> bool:
        """Whether the joiner has got everything up to now, or has it on its way."""
        with self._change:
            return self._connected and not self._stale

    @property
    def wants_snapshot(self) -> bool:
        """Whether the next boundary has to give the whole state."""
        return self._stale and self._connected

    @property
    def wants_update(self) -> bool:
        """Whether the next agreement has to give its update."""
        return self._connected and not self._stale and not self._why_not

    def snapshot(self, version: int, image: Image) -> None:
        """Keep a copy of the state as it is now, and send it. At a boundary, in the training thread."""
        nbytes, most = image.manifest.nbytes, int(_SHARE * self._free()) // self._leavers
        if nbytes + _SPARE_BYTES > most:
            self._give_up(f"a copy of {nbytes >> 20} MiB does not fit in half of the memory that is free on this node")
            return
        try:
            parts = [memoryview(bytes(buffer)) for buffer in image.buffers]
        except MemoryError:
            self._give_up(f"a copy of {nbytes >> 20} MiB is refused on this node")
            return
        with self._change:
            if not self._connected:
                return
            self._stale = False
            self._snapshots += 1
            self._most_bytes = min(2 * nbytes + _SPARE_BYTES, most - nbytes)
            self._put(_Snapshot(version, image.manifest, parts))

    def update(self, version: int, optimizer: Optimizer) -> None:
        """Keep a copy of the gradients that make `version`, and send it. Training thread, behind an agreement."""
        try:
            groups = hyper_parameters(optimizer)
        except UnsupportedState as error:
            self._give_up(str(error))
            return
        sizes = gradient_sizes(optimizer)
        data = self._buffer(room(sizes))
        copy_gradients(optimizer, memoryview(data))
        with self._change:
            if self._queued_bytes + len(data) > self._most_bytes:
                self._overflow()
            elif self._connected:
                self._queued_bytes += len(data)
                self._put(_Update(version, groups, sizes, data))

    def skip(self, version: int) -> None:
        """The step that makes `version` updates nothing."""
        with self._change:
            self._put(_Update(version, b"", (), bytearray()))

    def hand_over(self, last: HandedOver) -> None:
        """The vote has passed: after what is queued comes this."""
        with self._change:
            self._put(last)

    def prove(self, digest: str) -> None:
        """The digest of the state that was handed over."""
        with self._change:
            self._put(FinalDigest(digest))

    def handle(self, sock: socket.socket) -> None:
        """Serve one follower until the move is over, or it is gone; closes the socket."""
        with sock:
            try:
                set_timeout(sock, _TIMEOUT_S)
                asked, _ = receive_frame(sock, most=0)
                number = asked.number if isinstance(asked, Follow) else 0
                if not self._admit(number):
                    return
                while (item := self._next(number)) is not None:
                    self._send(sock, item)
            except (OSError, PeerLost, TornRecord) as error:
                _log.info("the joiner does not follow any more: %s", error)
            with self._change:
                if self._number == number:
                    self._connected = False

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        self._number, self._why_not = 0, ""
        self._connected = self._stale = False
        self._snapshots = self._queued_bytes = 0
        self._queue.clear()
        self._pool.clear()
        self._change.notify_all()

    def _admit(self, number: int) -> bool:
        with self._change:
            if not number or number != self._number or self._connected:
                return False
            self._connected = True
            self._stale = not self._why_not
            if self._why_not:
                self._put(NothingToFollow(self._why_not))
            return True

    def _put(self, item: _Item) -> None:
        if self._connected:
            self._queue.append(item)
            self._change.notify_all()

    def _overflow(self) -> None:
        """The joiner is too slow: it gets the whole state again, or, after some times, only at the end."""
        self._queue.clear()
        self._queued_bytes = 0
        if self._snapshots >= _MOST_SNAPSHOTS:
            self._why_not = "the joiner cannot keep up"
            self._put(NothingToFollow(self._why_not))
        else:
            self._stale = True

    def _give_up(self, why: str) -> None:
        with self._change:
            self._why_not, self._stale = why, False
            self._put(NothingToFollow(why))

    def _next(self, number: int) -> _Item | None:
        with self._change:
            self._change.wait_for(lambda: self._queue or self._number != number)
            return self._queue.popleft() if self._number == number else None

    def _send(self, sock: socket.socket, item: _Item) -> None:
        before = self._await_gap if self.waits_for_gaps else None
        if isinstance(item, _Snapshot):
            digests = chunk_digests(item.parts, item.manifest.chunks())
            head: Description = SnapshotHead(item.version, item.manifest.encode(), digests, self._behind())
            send_frame(sock, head, payload=item.parts, before_piece=before)
        elif isinstance(item, _Update):
            digest = xxhash.xxh3_64_digest(item.data)
            head = UpdateHead(item.version, item.groups, item.sizes, digest, self._behind())
            send_frame(sock, head, payload=[memoryview(item.data)], before_piece=before if self._behind() else None)
            self._give_back(item.data)
        else:
            send_frame(sock, item)

    def _behind(self) -> int:
        with self._change:
            return len(self._queue)

    def _await_gap(self) -> None:
        """Wait until no collective runs, but not for long."""
        waited = 0.0
        while waited < _GAP_PATIENCE_S and self._fabric.busy:
            self._pause.wait(_GAP_LOOK_S)
            waited += _GAP_LOOK_S

    def _buffer(self, nbytes: int) -> bytearray:
        with self._change:
            while self._pool:
                kept = self._pool.pop()
                if len(kept) == nbytes:
                    return kept
        return bytearray(nbytes)

    def _give_back(self, data: bytearray) -> None:
        with self._change:
            self._queued_bytes -= len(data)
            if data and len(self._pool) < _MOST_POOLED:
                self._pool.append(data)
