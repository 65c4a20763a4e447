"""Links that stand beside those in use, for a change that all members make at one boundary.

A change has a number. Some of its links are dialled here, in threads; others arrive from peers, possibly before this
member has heard of the change. When all that are expected are there, the number counts as prepared.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from keepstep.errors import MembershipError, TransportError

__all__ = ["Arrived", "LinkKey", "Spares"]

_MOST = 16_384
"""Most links kept for changes that this member has not heard of."""


class LinkKey(NamedTuple):
    """Which link: its group, the lane and the global rank at the other end."""

    group: str
    lane: int
    peer: int


class Arrived(NamedTuple):
    """A connection that is to become a link; `memory_fd` is -1 for one that shares no memory."""

    sock: socket.socket
    memory_fd: int = -1

    def discard(self) -> None:
        """Close it and give its memory back."""
        self.sock.close()
        if self.memory_fd >= 0:
            os.close(self.memory_fd)

    def leave_open(self) -> int:
        """Give its memory back, but not the connection: the descriptor, for the caller to close."""
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
        return self.sock.detach()


class Spares:
    """The links for changes that were not made yet. Thread-safe.

    `call(key, number)` dials one link and raises TransportError, MembershipError or OSError. `prepared` and
    `installed` are numbers of changes.
    """

    def __init__(self, call: Callable[[LinkKey, int], Arrived]) -> None:
        self.prepared = self.installed = self.number = 0
        self._call = call
        self._lock = threading.Lock()
        self._kept: dict[LinkKey, tuple[int, Arrived]] = {}
        self._missing: set[LinkKey] = set()
        self._ready: Callable[[str], None] | None = None

    def expect(
        self, number: int, missing: Iterable[LinkKey], *, dial: Iterable[LinkKey], ready: Callable[[str], None]
    ) -> None:
        """Change `number` needs the links `missing`; those in `dial` are called from here. `ready("")` is called once
        all is there, `ready(why)` if that cannot be; both possibly before this returns, and from other threads. What
        came for a newer change stays."""
        with self._lock:
            old = {key: spare for key, spare in self._kept.items() if spare[0] < number}
            for key in old:
                del self._kept[key]
            self.number, self._missing, self._ready = number, set(missing), ready
        for _, arrived in old.values():
            arrived.discard()
        for key in dial:
            threading.Thread(target=self._dial, args=(number, key), name="keepstep-spare", daemon=True).start()
        self._look(number)

    def arrived(self, key: LinkKey, number: int, *, arrived: Arrived) -> None:
        """A peer dialled a link for change `number`, which may come before the change; for an older one it is
        dropped."""
        with self._lock:
            stale = number < self.number or number <= self.installed or len(self._kept) >= _MOST
            if not stale:
                self._keep(key, number, arrived=arrived)
        if stale:
            arrived.discard()
        else:
            self._look(number)

    def take(self, number: int) -> dict[LinkKey, Arrived]:
        """The links of change `number`, which counts as made now."""
        with self._lock:
            self.installed = self.prepared = number
            taken = {key: arrived for key, (kept, arrived) in self._kept.items() if kept == number}
            for key in taken:
                del self._kept[key]
            self._missing, self._ready = set(), None
        return taken

    def drop(self) -> None:
        """What was prepared is void."""
        with self._lock:
            kept, self._kept = self._kept, {}
            self.prepared = self.installed
            self._missing, self._ready = set(), None
        for _, arrived in kept.values():
            arrived.discard()

    def _keep(self, key: LinkKey, number: int, *, arrived: Arrived) -> None:
        """With the lock held: of two links the one for the newer change stays."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] > number:
            arrived.discard()
            return
        if kept is not None:
            kept[1].discard()
        self._kept[key] = number, arrived

    def _dial(self, number: int, key: LinkKey) -> None:
        try:
            arrived = self._call(key, number)
        except (TransportError, MembershipError, OSError) as error:
            self._say(number, f"rank {key.peer} was not reached: {error}")
            return
        with self._lock:
            current = self.number == number and self._ready is not None
            if current:
                self._keep(key, number, arrived=arrived)
        if current:
            self._look(number)
        else:
            arrived.discard()

    def _look(self, number: int) -> None:
        with self._lock:
            there = {key for key, (kept, _) in self._kept.items() if kept == number}
            done = self.number == number and self._ready is not None and self._missing <= there
            if done:
                self.prepared = number
        if done:
            self._say(number, "")

    def _say(self, number: int, why: str) -> None:
        with self._lock:
            ready = self._ready if self.number == number else None
            if ready is not None:
                self._ready = None
        if ready is not None:
            ready(why)
