"""Planned paths: which source port a link of a collective leaves from, and how links move to other ports.

A switch sends a connection this way or that by a hash of its addresses and ports, so a source port is a path. A plan
names, for each peer, the ports that lead over the wanted path. `prepare` dials the links that leave from another port
anew while training goes on; when all members have theirs, all change over at the same step boundary.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from keepstep.training.spares import Arrived, LinkKey, Spares

__all__ = ["PathPlan", "Paths", "ends"]


class PathPlan(NamedTuple):
    """`dial`: the source ports to reach a global rank from; `accept`: those it will call from. Ports of one path."""

    number: int
    dial: Mapping[int, tuple[int, ...]] = {}
    accept: Mapping[int, tuple[int, ...]] = {}


def ends(sock: socket.socket) -> tuple[int, int]:
    """Local and remote TCP port of a connection; (0, 0) for any other kind, and for one whose other side is gone."""
    if sock.family == socket.AF_UNIX:
        return 0, 0
    try:
        return int(sock.getsockname()[1]), int(sock.getpeername()[1])
    except OSError:
        return 0, 0


class Paths:
    """The plan in force and the links that wait for the next one. Thread-safe.

    `call(key, number)` dials one link. `prepared` and `installed` are numbers of plans.
    """

    def __init__(self, call: Callable[[LinkKey, int], Arrived]) -> None:
        self._spares = Spares(call)
        self._lock = threading.Lock()
        self._plan = PathPlan(0)
        self._ends: dict[LinkKey, tuple[int, int]] = {}
        self._turns: dict[int, int] = {}

    @property
    def prepared(self) -> int:
        """The newest plan whose links are all there."""
        return self._spares.prepared

    @property
    def installed(self) -> int:
        """The plan in force."""
        return self._spares.installed

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
        """Takes `plan` for new links and dials in threads what must move; `ready` as in `Spares.expect`."""
        with self._lock:
            self._plan = plan
            moving = [key for key in standing if self._moves(key, plan)]
        self._spares.expect(plan.number, moving, dial=[key for key in moving if key.peer in plan.dial], ready=ready)

    def arrived(self, key: LinkKey, number: int, *, sock: socket.socket) -> None:
        """A peer dialled a link for plan `number`, which may come before the plan; one of an older plan is dropped."""
        self._spares.arrived(key, number, arrived=Arrived(sock))

    def take(self) -> dict[LinkKey, Arrived]:
        """The links that replace others now; the prepared plan counts as installed."""
        return self._spares.take(self._spares.prepared)

    def drop(self) -> None:
        """The membership changed: what was prepared is void; the plan still holds for new links."""
        self._spares.drop()

    def _moves(self, key: LinkKey, plan: PathPlan) -> bool:
        local, remote = self._ends.get(key, (0, 0))
        if not local:
            return False  # shared memory
        if key.peer in plan.dial:
            return local not in plan.dial[key.peer]
        return key.peer in plan.accept and remote not in plan.accept[key.peer]
