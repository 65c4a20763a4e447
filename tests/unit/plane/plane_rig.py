"""Groups of planes inside one process, linked as a test likes, and helpers to run calls on all of them at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import numpy as np

from keepstep.training.plane import Call, Domain, Element, Lane, Op, Plane, Reduction, Status, shared_link_bytes

Kind = Callable[[int, int], str]
KINDS: dict[str, Kind] = {
    "shm": lambda a, b: "shm",
    "tcp": lambda a, b: "tcp",
    "mixed": lambda a, b: "shm" if (a + b) % 2 else "tcp",
    "mixed2": lambda a, b: "tcp" if (a * 3 + b) % 4 < 2 else "shm",
}


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


def link(a: Plane, b: Plane, kind: str) -> None:
    """Links two planes to each other."""
    if kind == "tcp":
        left, right = tcp_pair()
        a.link_tcp(b.rank, left)
        b.link_tcp(a.rank, right)
        return
    left, right = socket.socketpair()
    memory = os.memfd_create("link")
    os.ftruncate(memory, shared_link_bytes())
    a.link_shared(b.rank, left, memory_fd=memory, creator=True)
    b.link_shared(a.rank, right, memory_fd=memory, creator=False)
    os.close(memory)


class Group:
    """`size` members with one domain each, all in this process."""

    def __init__(self, size: int, kind: Kind, *, lane: Lane = Lane.COLLECTIVE, protected: bool = False) -> None:
        self.size, self.kind, self.lane = size, kind, lane
        self.domains = [Domain(protected=protected) for _ in range(size)]
        self.planes = [self.member(rank) for rank in range(size)]
        for a in range(size):
            for b in range(a + 1, size):
                link(self.planes[a], self.planes[b], kind(a, b))

    def member(self, rank: int) -> Plane:
        """A plane without links for `rank`."""
        ranks = tuple(range(100, 100 + self.size))
        return Plane(self.domains[rank], rank, size=self.size, lane=self.lane, group="test", global_ranks=ranks)

    def replace(self, rank: int) -> None:
        """A new member takes the place of `rank`: new links to all others, whose other links stay."""
        for other in range(self.size):
            if other != rank:
                self.planes[other].unlink(rank)
        self.domains[rank].close()
        self.domains[rank] = Domain(protected=self.domains[rank].protected)
        self.planes[rank] = self.member(rank)
        for other in range(self.size):
            if other != rank:
                link(self.planes[min(rank, other)], self.planes[max(rank, other)], self.kind(rank, other))

    def submit(self, calls: Sequence[Call]) -> list[int]:
        """One call per member."""
        return [plane.submit(call) for plane, call in zip(self.planes, calls, strict=True)]

    def wait(self, tickets: Sequence[int], timeout_s: float = 30.0) -> list[Status]:
        """Waits for one ticket per member."""
        return [plane.wait(ticket, timeout_s) for plane, ticket in zip(self.planes, tickets, strict=True)]

    def run(self, calls: Sequence[Call]) -> list[Status]:
        """Submits, waits and releases."""
        tickets = self.submit(calls)
        statuses = self.wait(tickets)
        for plane, ticket in zip(self.planes, tickets, strict=True):
            plane.release(ticket)
        return statuses

    def close(self) -> None:
        """Closes all domains."""
        for domain in self.domains:
            domain.close()


def span(array: np.ndarray) -> tuple[int, int]:
    """Address and bytes of an array."""
    return array.ctypes.data, array.nbytes


def spans(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Addresses and bytes."""
    return [span(array) for array in arrays]


def all_reduce(array: np.ndarray, *, element: Element = Element.FLOAT32, how: Reduction = Reduction.SUM) -> Call:
    """An all_reduce in place."""
    return Call(Op.ALL_REDUCE, element, how, inputs=[span(array)], outputs=[span(array)], timeout_s=30)
