"""Planned paths: which source port a link of a collective leaves from, and how links move to other ports.

A switch sends a connection this way or that by a hash of its addresses and ports, so a source port is a path. A plan
names, for each peer, the ports that lead over the wanted path. `prepare` dials the links that leave from another port
anew while training goes on; when all members have theirs, all change over at the same step boundary.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from keepstep.errors import MembershipError, TransportError

__all__ = ["LinkKey", "PathPlan", "Paths", "ends"]


class LinkKey(NamedTuple):
    """Which link: its group, the lane and the global rank at the other end."""

    group: str
    lane: int
    peer: int


class PathPlan(NamedTuple):
    """`dial`: the source ports to reach a global rank from; `accept`: those it will call from. Ports of one path."""

    number: int
    dial: Mapping[int, tuple[int, ...]] = {}
    accept: Mapping[int, tuple[int, ...]] = {}


def ends(sock: socket.socket) -> tuple[int, int]:
    """Local and remote TCP port of a connection; (0, 0) for any other kind."""
    if sock.family == socket.AF_UNIX:
        return 0, 0
    return int(sock.getsockname()[1]), int(sock.getpeername()[1])


class Paths:
    """The plan in force and the links that wait for the next one. Thread-safe.

    `call(key, ports)` dials one link. `prepared` and `installed` are numbers of plans.
    """

    def __init__(self, call: Callable[[LinkKey, tuple[int, ...]], socket.socket]) -> None:
        self.prepared = self.installed = 0
        self._call = call
        self._lock = threading.Lock()
        self._plan = PathPlan(0)
        self._ends: dict[LinkKey, tuple[int, int]] = {}
        self._spare: dict[LinkKey, tuple[int, socket.socket]] = {}
        self._missing: set[LinkKey] = set()
        self._ready: Callable[[str], None] | None = None
        self._turns: dict[int, int] = {}

    @property
    def planned(self) -> int:
        """Number of the newest plan."""
        with self._lock:
            return self._plan.number

    def source_ports(self, peer: int) -> tuple[int, ...]:
        """The ports to dial `peer` from, another one first each time; empty: any."""
        with self._lock:
            ports = self._plan.dial.get(peer, ())
            turn = self._turns[peer] = self._turns.get(peer, -1) + 1
        return ports[turn % len(ports) :] + ports[: turn % len(ports)] if ports else ()

    def awaited(self, peer: int) -> bool:
        """Whether `peer` is the one to dial the links between us."""
        with self._lock:
            return peer in self._plan.accept

    def note(self, key: LinkKey, sock: socket.socket) -> None:
        """A link was attached."""
        with self._lock:
            self._ends[key] = ends(sock)

    def prepare(self, plan: PathPlan, standing: Iterable[LinkKey], *, ready: Callable[[str], None]) -> None:
        """Takes `plan` for new links and dials in threads what must move. `ready("")` is called once all is there,
        `ready(why)` if that cannot be; both possibly before this returns, and from other threads."""
        with self._lock:
            old = {key: spare for key, spare in self._spare.items() if spare[0] != plan.number}
            for key in old:
                del self._spare[key]
            self._plan, self._ready = plan, ready
            moving = [key for key in standing if self._moves(key, plan)]
            self._missing = set(moving)
        for _, sock in old.values():
            sock.close()
        for key in moving:
            if key.peer in plan.dial:
                threading.Thread(target=self._dial, args=(plan, key), name="keepstep-path", daemon=True).start()
        self._look(plan.number)

    def arrived(self, key: LinkKey, number: int, *, sock: socket.socket) -> None:
        """A peer dialled a link for plan `number`, which may come before the plan; one of an older plan is dropped."""
        with self._lock:
            stale = number < self._plan.number or number <= self.installed
            if not stale:
                self._keep(key, number, sock=sock)
        if stale:
            sock.close()
        else:
            self._look(number)

    def take(self) -> Iterator[tuple[LinkKey, socket.socket]]:
        """The links that replace others now; the prepared plan counts as installed."""
        with self._lock:
            self.installed = self.prepared
            taken = {key: sock for key, (number, sock) in self._spare.items() if number == self.installed}
            for key in taken:
                del self._spare[key]
        yield from taken.items()

    def drop(self) -> None:
        """The membership changed: what was prepared is void; the plan still holds for new links."""
        with self._lock:
            spare, self._spare = self._spare, {}
            self.prepared = self.installed
            self._missing, self._ready = set(), None
        for _, sock in spare.values():
            sock.close()

    def _moves(self, key: LinkKey, plan: PathPlan) -> bool:
        local, remote = self._ends.get(key, (0, 0))
        if not local:
            return False  # shared memory
        if key.peer in plan.dial:
            return local not in plan.dial[key.peer]
        return key.peer in plan.accept and remote not in plan.accept[key.peer]

    def _keep(self, key: LinkKey, number: int, *, sock: socket.socket) -> None:
        if key in self._spare:
            self._spare[key][1].close()
        self._spare[key] = number, sock

    def _dial(self, plan: PathPlan, key: LinkKey) -> None:
        try:
            sock = self._call(key, self.source_ports(key.peer))
        except (TransportError, MembershipError, OSError) as error:
            self._say(plan.number, f"rank {key.peer} was not reached over its path: {error}")
            return
        with self._lock:
            current = self._plan.number == plan.number
            if current:
                self._keep(key, plan.number, sock=sock)
        if current:
            self._look(plan.number)
        else:
            sock.close()

    def _look(self, number: int) -> None:
        with self._lock:
            there = {key for key, (planned, _) in self._spare.items() if planned == number}
            done = self._plan.number == number and self._missing <= there
            if done:
                self.prepared = number
        if done:
            self._say(number, "")

    def _say(self, number: int, why: str) -> None:
        with self._lock:
            ready = self._ready if self._plan.number == number else None
            if ready is not None:
                self._ready = None
        if ready is not None:
            ready(why)
