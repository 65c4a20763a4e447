"""Where a member is reached: one abstract Unix socket, one TCP listener, and the thread that answers hellos there.

`Doors` open before the member knows its rank (their address goes into its Hello); the porter thread starts when a
fabric takes them over. Every connection runs the hello of `authentication.py` on a non-blocking socket inside one
selector, so that wrong, slow and dead callers cost nothing but their own connection: at most 256 unfinished hellos
are kept, the oldest is dropped first, and one that makes no progress while nothing else happens is dropped too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
from typing import Protocol

from keepstep.errors import EnvironmentProblem, PeerLost
from keepstep.records.messages import Address
from keepstep.training.authentication import Arrival, Greeting, Verdict

__all__ = ["Doors", "Host"]

_log = logging.getLogger("keepstep")
_MAX_ARRIVALS = 256
_IDLE_TICKS = 5
_BACKLOG = 1024


class Host(Protocol):
    """Who decides about callers. Both methods run in the porter thread and must not block."""

    def judge(self, greeting: Greeting) -> Verdict:
        """What to answer. PARKED keeps the caller waiting until `Doors.reconsider`."""
        ...

    def deliver(self, greeting: Greeting, sock: socket.socket, *, memory_fd: int) -> None:
        """A proven, welcome and confirmed connection (blocking socket); the host owns it and `memory_fd` now."""
        ...

    def withdrawn(self, greeting: Greeting) -> None:
        """A caller that was told WELCOME hung up before it confirmed."""
        ...


class Doors:
    """The listeners of one process; `address` is what others need to reach it.

    `host` is bound by TCP (loopback by default), `advertised` is what others are told (by default `host`). Raises
    EnvironmentProblem if it cannot listen.
    """

    def __init__(self, member: str, node: str, *, host: str = "127.0.0.1", port: int = 0, advertised: str = "") -> None:
        local = f"keepstep.{os.getpid()}.{secrets.token_hex(8)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind("\0" + local)
        self._unix.listen(_BACKLOG)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._tcp = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            self._unix.close()
            raise EnvironmentProblem(
                f"cannot listen on {host} port {port}: {error.strerror or error}",
                remedy="choose another address or a free port",
            ) from error
        self.address = Address(member, node, local, advertised or host, self._tcp.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._arrivals: dict[int, Arrival] = {}
        self._parked: dict[int, Arrival] = {}
        self._confirming: set[int] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._host: Host | None = None
        self._secret = b""

    def open(self, host: Host, secret: bytes) -> None:
        """Starts answering hellos for `host`. Callers that came earlier were kept waiting by the kernel."""
        self._host, self._secret = host, secret
        for listener in (self._unix, self._tcp):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="keepstep-doors", daemon=True)
        self._thread.start()

    def reconsider(self) -> None:
        """Has the parked callers judged again; from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"r")

    def close(self) -> None:
        """Stops listening and drops unfinished hellos. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.reconsider()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        for arrival in list(self._arrivals.values()):
            arrival.drop()
        self._unix.close()
        self._tcp.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ------------------------------------------------------------------ the porter thread

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select(1.0)
            if not ready:
                self._age()
            for key, _ in ready:
                if isinstance(key.data, Arrival):
                    self._serve(key.data)
                elif key.data is None:
                    self._review()
                else:
                    self._accept(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        waiting = [fd for fd in self._arrivals if fd not in self._parked]
        if len(self._arrivals) >= _MAX_ARRIVALS and waiting:
            self._drop(self._arrivals[waiting[0]])
        try:
            arrival = Arrival(sock, self._secret)
        except OSError:
            sock.close()
            return
        self._arrivals[sock.fileno()] = arrival
        self._selector.register(sock, selectors.EVENT_READ, arrival)

    def _serve(self, arrival: Arrival) -> None:
        descriptor = arrival.sock.fileno()
        arrival.age = 0
        try:
            if descriptor in self._confirming:
                if arrival.committed():
                    self._hand_over(arrival)
            elif descriptor in self._parked:
                arrival.committed()
                raise PeerLost("a parked caller spoke out of turn")
            elif arrival.advance():
                self._judge(arrival)
        except (PeerLost, OSError):
            self._drop(arrival)

    def _judge(self, arrival: Arrival) -> None:
        assert self._host is not None and arrival.greeting is not None
        descriptor = arrival.sock.fileno()
        greeting = arrival.greeting
        right = greeting.target == self.address.member
        verdict = self._host.judge(greeting) if right else Verdict.STRANGER
        if verdict == Verdict.PARKED:
            self._parked[descriptor] = arrival
            return
        self._parked.pop(descriptor, None)
        if verdict == Verdict.WELCOME:
            self._confirming.add(descriptor)
        arrival.answer(verdict)
        if verdict != Verdict.WELCOME:
            self._drop(arrival)

    def _review(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        for arrival in list(self._parked.values()):
            try:
                self._judge(arrival)
            except OSError:
                self._drop(arrival)

    def _hand_over(self, arrival: Arrival) -> None:
        assert self._host is not None and arrival.greeting is not None
        self._forget(arrival)
        arrival.sock.setblocking(True)
        self._host.deliver(arrival.greeting, arrival.sock, memory_fd=arrival.memory_fd)

    def _forget(self, arrival: Arrival) -> bool:
        descriptor = arrival.sock.fileno()
        self._selector.unregister(arrival.sock)
        self._arrivals.pop(descriptor, None)
        self._parked.pop(descriptor, None)
        expected = descriptor in self._confirming
        self._confirming.discard(descriptor)
        return expected

    def _drop(self, arrival: Arrival) -> None:
        if self._forget(arrival) and self._host is not None and arrival.greeting is not None:
            self._host.withdrawn(arrival.greeting)
        arrival.drop()

    def _age(self) -> None:
        for descriptor, arrival in list(self._arrivals.items()):
            arrival.age += 1
            if arrival.age > _IDLE_TICKS and descriptor not in self._parked:
                self._drop(arrival)
