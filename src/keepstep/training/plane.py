"""Binding of the C data plane (`plane/*.c`): domains, planes, links and calls.

A *domain* is what is aborted and renewed together (one per process); a *plane* is one group's lane through it, with its
own links and a worker thread that starts at the first call. All ranks here are group ranks.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from threading import Lock
from typing import Any

from keepstep.errors import EnvironmentProblem, TransportError, UsageError
from keepstep.training.plane_library import NO_SPARE, BufferStruct, CallStruct, FailureStruct, library

__all__ = [
    "Call",
    "Domain",
    "Element",
    "Failure",
    "Lane",
    "Op",
    "Plane",
    "Reduction",
    "Status",
    "shared_link_bytes",
]

_WAIT_SLICE_S = 0.25
"""Longest stay inside C before Python may look at signals, seconds."""

_Buffers = Sequence[tuple[int, int]]


class Lane(IntEnum):
    """Collectives run one at a time and in order; point-to-point calls all at once."""

    COLLECTIVE = 0
    P2P = 1


class Op(IntEnum):
    """What a call does."""

    ALL_REDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


class Reduction(IntEnum):
    """How two elements become one; AVG divides the sum by the size of the group."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7


class Element(IntEnum):
    """Type of the elements; UINT8 also stands for plain bytes."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    UINT16 = 5
    UINT32 = 6
    UINT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT32 = 10
    FLOAT64 = 11
    BOOL = 12
    COMPLEX64 = 13
    COMPLEX128 = 14

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return (1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16)[self]


class Status(IntEnum):
    """State of a call; the numbers are those in recorder slots."""

    PENDING = 0
    RUNNING = 1
    DONE = 2
    ABORTED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed: the group rank it waited for (-1: none), an errno and one line for people."""

    peer: int
    errno: int
    what: str


@dataclass(slots=True)
class Call:
    """One operation; buffers are (address, bytes) and must live until the call is over.

    `timeout_s` counts from submit. `inline` promises that the submitting thread waits for the ticket at once; it then
    does the work itself, which saves two changes of thread.
    """

    op: Op
    element: Element = Element.UINT8
    reduction: Reduction = Reduction.SUM
    root: int = 0
    peer: int = -1
    tag: int = 0
    inputs: _Buffers = ()
    outputs: _Buffers = ()
    timeout_s: float | None = None
    want_future: bool = False
    inline: bool = False


def shared_link_bytes() -> int:
    """Bytes of the memory file of a shared link; its creator makes it with `os.memfd_create` and `os.ftruncate`."""
    return int(library().ks_shared_bytes())


class Domain:
    """Everything that is aborted together.

    In a *protected* domain a failing link poisons it before any call ends, and calls end ABORTED; otherwise the call
    that needed the link ends FAILED with the peer named.
    """

    def __init__(self, *, protected: bool) -> None:
        self._c = library()
        self._handle = self._c.ks_domain_new(int(protected))
        self.protected = protected
        self.failure_fd: int = self._c.ks_domain_failure_fd(self._handle)
        self.planes: dict[int, Plane] = {}
        self._closed = False

    def poison(self) -> None:
        """Ends every call, now and until `install`; on return nothing touches anybody's buffers. Any thread."""
        self._c.ks_domain_poison(self._handle)

    def install(self, generation: int) -> None:
        """Begins a generation: poison and losses are cleared, all planes count from 0; links stay."""
        if not self.generation <= generation < 2**32:
            raise UsageError(f"generation {generation} does not follow {self.generation}")
        self._c.ks_domain_install(self._handle, generation)

    def set_step(self, step: int) -> None:
        """Names the training step that records carry from now on."""
        self._c.ks_domain_set_step(self._handle, step)

    def span_begin(self, what: int) -> int:
        """Records that the training loop begins `what` (`records.ring.SpanKind`); give the result to `span_end`."""
        return int(self._c.ks_span_begin(self._handle, what))

    def span_end(self, mark: int) -> None:
        """Records its end; a span that the ring has passed is dropped."""
        self._c.ks_span_end(self._handle, mark)

    def limit(self, rank: int, bytes_per_s: float | None) -> None:
        """A drill: all bytes to the member of global `rank` pass a wire of `bytes_per_s`. 0 cuts it, below 0 it is only
        counted, None ends the drill. The time on the wire is recorded as such. UsageError: too many drilled links."""
        if self._c.ks_domain_limit(self._handle, rank, float("nan") if bytes_per_s is None else bytes_per_s):
            raise UsageError(f"no room for a drill on the link to rank {rank}")

    def limited_bytes(self, rank: int) -> int:
        """Bytes sent to the member of global `rank` since the drill on its link began; 0 without one."""
        return int(self._c.ks_domain_sent(self._handle, rank))

    @property
    def generation(self) -> int:
        """The generation installed last; 0 at first."""
        return int(self._c.ks_domain_generation(self._handle))

    @property
    def poisoned(self) -> bool:
        """True from the first poison or link failure (protected) until `install`."""
        return bool(self._c.ks_domain_poisoned(self._handle))

    def lost(self) -> frozenset[tuple[Plane, int]]:
        """The (plane, peer) links that failed since the last `install`; `failure_fd` is readable meanwhile."""
        most = 4096
        handles, peers = (ctypes.c_void_p * most)(), (ctypes.c_int * most)()
        count = min(most, self._c.ks_domain_lost(self._handle, handles, peers, most))
        known = dict(self.planes)
        return frozenset((known[h], peers[i]) for i in range(count) if (h := handles[i] or 0) in known)

    def record_into(self, base_address: int, size: int) -> None:
        """Records every call into this recorder ring (its header must be written) and switches recording on."""
        if self._c.ks_domain_record(self._handle, base_address, size):
            raise UsageError(f"a recorder ring of {size} bytes is too small")

    @property
    def recording(self) -> bool:
        """Whether calls are recorded; can only be switched on once there is a ring."""
        return bool(self._c.ks_domain_recording(self._handle))

    @recording.setter
    def recording(self, value: bool) -> None:
        self._c.ks_domain_set_recording(self._handle, int(value))

    def close(self) -> None:
        """Closes all planes; may be called twice."""
        for plane in list(self.planes.values()):
            plane.close()
        if not self._closed:
            self._closed = True
            self._c.ks_domain_close(self._handle)


class Plane:
    """One lane of one group: links to peers, and calls over them."""

    def __init__(
        self, domain: Domain, rank: int, *, size: int, lane: Lane, group: str, global_ranks: tuple[int, ...]
    ) -> None:
        if not 0 <= rank < size or len(global_ranks) != size or not group:
            raise UsageError(f"rank {rank} of {size} with {len(global_ranks)} global ranks makes no group {group!r}")
        self._c = domain._c
        self.domain, self.rank, self.size, self.lane = domain, rank, size, lane
        self.group, self.global_ranks = group, global_ranks
        ranks = (ctypes.c_int * size)(*global_ranks)
        handle = self._c.ks_plane_new(domain._handle, rank, size, int(lane), group.encode(), ranks)
        if not handle:
            raise EnvironmentProblem("no memory or file descriptor for a plane", where=group)
        self._handle: int | None = handle
        self._linked: set[int] = set()
        self._lock = Lock()
        domain.planes[handle] = self

    def _open(self) -> int:
        if self._handle is None:
            raise TransportError("the plane is closed", where=self.group)
        return self._handle

    def _link(self, peer: int, error: int) -> None:
        if error:
            raise UsageError(f"cannot link rank {peer}: {os.strerror(error)}", where=self.group)
        self._linked.add(peer)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(f"rank {peer} is no peer of rank {self.rank} in a group of {self.size}", where=self.group)

    def link_tcp(self, peer: int, sock: socket.socket) -> None:
        """Takes over a connected stream socket as the link to `peer`; UsageError if there is one."""
        self._check_peer(peer)
        with self._lock:
            self._link(peer, self._c.ks_link_tcp(self._open(), peer, sock.detach()))

    def link_shared(self, peer: int, doorbell: socket.socket, *, memory_fd: int, creator: bool) -> None:
        """Links `peer` through shared memory; takes over the doorbell, not `memory_fd`."""
        self._check_peer(peer)
        with self._lock:
            handle = self._open()
            self._link(peer, self._c.ks_link_shared(handle, peer, doorbell.detach(), memory_fd, int(creator)))

    def unlink(self, peer: int) -> None:
        """Closes the link to `peer`, if any; calls that need it wait for the next one."""
        self._check_peer(peer)
        with self._lock:
            self._c.ks_unlink(self._open(), peer)
            self._linked.discard(peer)

    def retire(self, peer: int) -> int:
        """Takes the link to `peer` out of use without ending it: the other side can still read and write. Returns its
        descriptor, for the caller to close (-1: no link)."""
        self._check_peer(peer)
        with self._lock:
            self._linked.discard(peer)
            return int(self._c.ks_retire(self._open(), peer))

    def linked(self) -> frozenset[int]:
        """The peers that have a link, dead or alive."""
        with self._lock:
            return frozenset(self._linked)

    @property
    def busy(self) -> bool:
        """Whether a call runs or waits."""
        return bool(self._c.ks_busy(self._open()))

    def link_fd(self, peer: int) -> int:
        """The socket behind a link, which stays the plane's (-1: no link)."""
        self._check_peer(peer)
        with self._lock:
            return int(self._c.ks_link_fd(self._open(), peer))

    def peers_needed(self, op: Op, *, nbytes: int, root: int = 0) -> frozenset[int]:
        """The peers this member talks to in such a call; `nbytes` counts all buffers of the call."""
        peers = (ctypes.c_int * self.size)()
        count = self._c.ks_peers_needed(self._open(), int(op), nbytes, root, peers)
        return frozenset(peers[:count])

    def submit(self, call: Call) -> int:
        """Queues a call and returns its ticket; UsageError if the call makes no sense."""
        inputs, outputs = call.inputs, call.outputs
        struct = CallStruct(
            call.op,
            call.element,
            call.reduction,
            call.want_future,
            call.inline,
            NO_SPARE,
            call.root,
            call.peer,
            call.tag,
            len(inputs),
            len(outputs),
            _buffers(len(inputs))(*inputs),
            _buffers(len(outputs))(*outputs),
            -1.0 if call.timeout_s is None else max(call.timeout_s, 1e-9),
        )
        why = ctypes.c_char_p()
        ticket = self._c.ks_submit(self._open(), ctypes.byref(struct), ctypes.byref(why))
        if not ticket:
            name = Op(call.op).name.lower() if call.op in set(Op) else str(call.op)
            raise UsageError(f"{name}: {(why.value or b'').decode()}", where=f"group {self.group}, rank {self.rank}")
        return int(ticket)

    def wait(self, ticket: int, timeout_s: float | None = None) -> Status:
        """Waits until a call is over; PENDING when `timeout_s` passed first. TransportError: no such ticket."""
        left = timeout_s
        while True:
            piece = _WAIT_SLICE_S if left is None else min(_WAIT_SLICE_S, max(left, 0.0))
            status = self._status(self._c.ks_wait(self._open(), ticket, piece), ticket)
            if left is not None:
                left -= piece
            if status is not Status.PENDING or (left is not None and left <= 0):
                return status

    def done(self, ticket: int) -> bool:
        """Whether a call is over, in whatever way."""
        return self._status(self._c.ks_status(self._open(), ticket), ticket) is not Status.PENDING

    def _status(self, status: int, ticket: int) -> Status:
        if status < 0:
            raise TransportError(f"ticket {ticket} does not exist or was released", where=self.group)
        return _STATUSES[status]

    def failure(self, ticket: int) -> Failure:
        """Why a FAILED call failed."""
        struct = FailureStruct()
        self._status(self._c.ks_failure(self._open(), ticket, ctypes.byref(struct)), ticket)
        return Failure(struct.peer, struct.errno, struct.what.decode(errors="replace"))

    def source(self, ticket: int) -> int:
        """The peer a finished receive came from; -1 before that."""
        return int(self._c.ks_source(self._open(), ticket))

    def next_done(self, timeout_s: float | None) -> int | None:
        """The next finished ticket with `want_future`; None after `timeout_s` or once the plane is closed."""
        handle = self._handle
        if handle is None:
            return None
        return self._c.ks_next_done(handle, -1.0 if timeout_s is None else timeout_s) or None

    def release(self, ticket: int) -> None:
        """Gives a ticket back; a closed plane has none left."""
        if self._handle is not None:
            self._c.ks_release(self._handle, ticket)

    def close(self) -> None:
        """Aborts what runs, tells the peers that this is orderly, closes the links; may be called twice."""
        with self._lock:
            handle, self._handle = self._handle, None
            self._linked.clear()
        if handle is not None:
            self.domain.planes.pop(handle, None)
            self._c.ks_plane_close(handle)


_STATUSES = (Status.PENDING, Status.PENDING, Status.DONE, Status.ABORTED, Status.FAILED)


@cache
def _buffers(count: int) -> Any:
    """The array type of `count` buffers."""
    return BufferStruct * count
