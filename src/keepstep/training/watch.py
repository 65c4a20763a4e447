"""News of a loss for everybody: a few links to peers at distances of powers of two, and a flood over them.

Every member keeps at most 2 * ceil(log2(N)) watch links, so that news reach all N members in at most ceil(log2(N))
hops and no member needs more than 20 of these sockets at N = 1,024. A watch link that breaks means that its member is
gone, unless it said good-bye before. In each pair the lower rank dials.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from keepstep.training.plane import Domain, Plane

__all__ = ["News", "Watch", "WatchEvents", "watch_peers"]

_NEWS = struct.Struct("<4sIIi")
_MAGIC = b"KSN1"


class News(IntEnum):
    """What is flooded: a member is lost, or it leaves in good order."""

    LOST = 1
    LEFT = 2


class WatchEvents(Protocol):
    """What the watch thread reports; ranks are global. None of these may block for long."""

    def heard(self, news: News, rank: int, *, generation: int) -> None:
        """News came in from a neighbour."""
        ...

    def hung_up(self, rank: int, generation: int) -> None:
        """The watch link to `rank` broke in `generation`."""
        ...

    def links_failed(self, failed: frozenset[tuple[Plane, int]], generation: int) -> None:
        """Data links broke in `generation`, by plane and group rank of the peer."""
        ...


def watch_peers(rank: int, ranks: Sequence[int]) -> frozenset[int]:
    """The members of `ranks` that `rank` keeps watch links with: those at distances of powers of two, both ways."""
    size, own = len(ranks), ranks.index(rank)
    steps = [1 << power for power in range(max(size - 1, 0).bit_length())]
    near = {ranks[(own + sign * step) % size] for step in steps for sign in (1, -1)}
    return frozenset(near - {rank})


class Watch:
    """The watch links of one member and the thread that reads them and the data plane's `failure_fd`."""

    def __init__(self, domain: Domain, events: WatchEvents) -> None:
        self._domain = domain
        self._events = events
        self._lock = threading.Lock()
        self._links: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytearray] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._failed: frozenset[tuple[Plane, int]] = frozenset()
        self._closing = False
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._selector.register(domain.failure_fd, selectors.EVENT_READ)
        self._listening = True
        self._thread = threading.Thread(target=self._run, name="keepstep-watch", daemon=True)
        self._thread.start()

    def add(self, rank: int, sock: socket.socket) -> None:
        """Takes over a watch link; one to the same rank that is still there is closed."""
        sock.setblocking(False)
        with self._lock:
            if self._closing:
                sock.close()
                return
            self._remove(rank)
            self._links[rank] = sock
            self._ranks[sock] = rank
            self._buffers[sock] = bytearray()
            self._selector.register(sock, selectors.EVENT_READ)
        self._wake()

    def renew(self, generation: int, ranks: frozenset[int]) -> None:
        """Begins `generation` in the domain and closes the links to `ranks`, as one thing: a link that broke before
        is reported with the older generation."""
        for descriptor in self.retire(generation, ranks):
            os.close(descriptor)

    def retire(self, generation: int, ranks: frozenset[int]) -> list[int]:
        """As `renew`, but the connections stay open: returns their descriptors, for the caller to close."""
        with self._lock:
            self._domain.install(generation)
            taken = [sock for rank in ranks if (sock := self._forget(rank)) is not None]
            self._failed = frozenset()
            if not self._listening and not self._closing:
                self._selector.register(self._domain.failure_fd, selectors.EVENT_READ)
                self._listening = True
        self._wake()
        return [sock.detach() for sock in taken]

    def linked(self) -> frozenset[int]:
        """The ranks with a standing watch link."""
        with self._lock:
            return frozenset(self._links)

    def inodes(self) -> dict[int, int]:
        """Socket inode of every watch link by rank."""
        with self._lock:
            return {rank: os.fstat(sock.fileno()).st_ino for rank, sock in self._links.items()}

    def tell(self, news: News, rank: int, *, generation: int) -> None:
        """Sends news to all neighbours. A neighbour whose socket is full is skipped: others will reach it."""
        data = _NEWS.pack(_MAGIC, news, generation, rank)
        with self._lock:
            for sock in self._links.values():
                with contextlib.suppress(OSError):
                    sock.send(data, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Closes all links and ends the thread. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
        with self._lock:
            for rank in list(self._links):
                self._remove(rank)
            self._selector.close()
            os.close(self._wake_fd)

    # ------------------------------------------------------------------ the watch thread

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                elif key.fd == self._domain.failure_fd:
                    self._look_at_failures()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _look_at_failures(self) -> None:
        with self._lock:
            generation, failed = self._domain.generation, self._domain.lost()
            fresh, self._failed = failed - self._failed, failed
            if failed and not fresh and self._listening:  # readable until install: listen again then
                self._selector.unregister(self._domain.failure_fd)
                self._listening = False
        if fresh:
            self._events.links_failed(fresh, generation)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        with self._lock:
            rank = self._ranks.get(sock)
            if rank is None:
                return
            buffer = self._buffers[sock]
            buffer += data
            whole = len(buffer) - len(buffer) % _NEWS.size
            messages = [_NEWS.unpack_from(buffer, at) for at in range(0, whole, _NEWS.size)]
            del buffer[:whole]
            broken = not data or any(message[0] != _MAGIC for message in messages)
            generation_now = self._domain.generation
            if broken:
                self._remove(rank)
        for magic, news, generation, about in messages:
            if magic == _MAGIC and news in (News.LOST, News.LEFT):
                self._events.heard(News(news), about, generation=generation)
        if broken:
            self._events.hung_up(rank, generation_now)

    def _remove(self, rank: int) -> None:
        sock = self._forget(rank)
        if sock is not None:
            sock.close()

    def _forget(self, rank: int) -> socket.socket | None:
        sock = self._links.pop(rank, None)
        if sock is not None:
            self._selector.unregister(sock)
            self._ranks.pop(sock, None)
            self._buffers.pop(sock, None)
        return sock

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)
