"""A library of device communicators without hardware, for several members in one process.

It behaves by the documented facts of NCCL: making one waits for all its ranks without blocking the caller; a call
waits on the stream for all ranks; shrink, revoke and grow are there from a version on; a grown communicator keeps the
old ranks and puts new ones last; growing from one with work under way fails; an abort ends what waits and may hang.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from keepstep.errors import TransportError
from keepstep.training.comm_library import GROW, REVOKE, CommState, Step

__all__ = ["StandInComms", "StandInLibrary"]

SHRINK = 22703
_DTYPES = {7: np.float32, 11: np.float64, 10: np.float32, 4: np.int64, 0: np.uint8, 3: np.int32}
_SUMS = {0: np.add.reduce, 1: np.multiply.reduce, 2: np.minimum.reduce, 3: np.maximum.reduce}


class _Meeting:
    """Where the ranks of a communicator come together: at its making, and at every call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.there: dict[int, object] = {}
        self.full = threading.Event()


class _Comm:
    def __init__(self, made: _Meeting, rank: int) -> None:
        self.made, self.rank = made, rank
        self.calls = itertools.count()
        self.under_way = 0
        self.failed = self.ended = self.broken = False


class StandInComms:
    """What all members share: who meets where. `log` has what the members did, as (member, what)."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.meetings: dict[object, _Meeting] = {}
        self.log: list[tuple[int, str]] = []
        self.numbers = itertools.count(1)

    def meet(self, where: object, size: int, *, rank: int, brings: object = None) -> _Meeting:
        with self.lock:
            meeting = self.meetings.setdefault(where, _Meeting(size))
            meeting.there[rank] = brings
            if len(meeting.there) == size:
                meeting.full.set()
            self.lock.notify_all()
            return meeting


class StandInLibrary:
    """The library of `member`. Knobs: `abort_hangs` (set it to let go again), `fails` (names of calls that fail)."""

    def __init__(self, comms: StandInComms, member: int, *, version: int = GROW) -> None:
        self._comms, self._member, self._version = comms, member, version
        self._held: dict[int, _Comm] = {}
        self.abort_hangs: threading.Event | None = None
        self.fails: set[str] = set()

    @property
    def version(self) -> int:
        return self._version

    def _note(self, what: str, since: int = 0) -> None:
        self._comms.log.append((self._member, what))
        if self._version < since or what in self.fails:
            raise TransportError(f"{what} does not work in version {self._version}")

    def _keep(self, meeting: _Meeting, rank: int) -> int:
        number = next(self._comms.numbers)
        self._held[number] = _Comm(meeting, rank)
        return number

    def unique_id(self, parent: int | None) -> bytes:
        self._note("unique_id", GROW if parent is not None else 0)
        return f"id {next(self._comms.numbers)}".encode()

    def form(self, unique_id: bytes, *, size: int, rank: int) -> int:
        self._note("form")
        return self._keep(self._comms.meet(("form", unique_id), size, rank=rank), rank)

    def shrink(self, parent: int, *, excluded: Sequence[int], abort: bool) -> int:
        self._note("shrink with abort" if abort else "shrink", SHRINK)
        old = self._held[parent]
        if abort:
            self._break(old)
        elif old.under_way:
            raise TransportError("work is under way on the parent")
        kept = [rank for rank in range(old.made.size) if rank not in excluded]
        rank = kept.index(old.rank)
        return self._keep(self._comms.meet(("shrink", id(old.made)), len(kept), rank=rank), rank)

    def grow(self, parent: int | None, *, size: int, rank: int, unique_id: bytes | None) -> int:
        self._note("grow", GROW)
        if parent is not None:
            old = self._held[parent]
            assert (unique_id is not None) == (old.rank == 0), "the first rank alone brings the unique id"
            assert not old.under_way
            rank = old.rank
            where: object = ("grow", id(old.made))
            if unique_id is not None:
                with self._comms.lock:
                    self._comms.meetings["where", unique_id] = self._comms.meetings.setdefault(where, _Meeting(size))
        else:
            assert unique_id is not None
            where = self._found(unique_id, size)
        return self._keep(self._comms.meet(where, size, rank=rank), rank)

    def _found(self, unique_id: bytes, size: int) -> object:
        """Newcomers find the old ones by the unique id of the first of these."""
        with self._comms.lock:
            assert self._comms.lock.wait_for(lambda: ("where", unique_id) in self._comms.meetings, 20)
            meeting = self._comms.meetings["where", unique_id]
            return next(key for key, one in self._comms.meetings.items() if one is meeting)

    def state(self, comm: int) -> CommState:
        held = self._held[comm]
        if held.failed or "state" in self.fails:
            return CommState.FAILED
        return CommState.READY if held.made.full.is_set() else CommState.WORKING

    def revoke(self, comm: int) -> None:
        self._note("revoke", REVOKE)
        self._break(self._held[comm])

    def abort(self, comm: int) -> None:
        self._note("abort")
        if self.abort_hangs is not None:
            assert self.abort_hangs.wait(20)
        held = self._held[comm]
        self._break(held)
        held.ended = True

    def _break(self, held: _Comm) -> None:
        with self._comms.lock:
            held.broken = True
            self._comms.lock.notify_all()

    def run(self, comm: int, steps: Sequence[Step], *, stream: Any) -> None:
        held = self._held[comm]
        assert not held.ended, "a call on a communicator that was aborted"
        number = next(held.calls)
        held.under_way += 1
        stream.put(lambda: self._together(held, number, steps))

    def _together(self, held: _Comm, number: int, steps: Sequence[Step]) -> None:
        """On the stream: waits for all ranks, whose last one moves the data, or for an abort of the own side."""
        comms, made = self._comms, held.made
        with comms.lock:
            meeting = comms.meetings.setdefault(("call", id(made), number), _Meeting(made.size))
            meeting.there[held.rank] = steps
            if len(meeting.there) == meeting.size:
                _move([meeting.there[rank] for rank in range(meeting.size)])  # type: ignore[misc]
                meeting.full.set()
            comms.lock.notify_all()
            comms.lock.wait_for(lambda: meeting.full.is_set() or held.broken, 20)
            held.under_way -= 1


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=np.uint8)


def _view(address: int, amount: int, element: int) -> np.ndarray:
    dtype = np.dtype(_DTYPES[element])
    return np.frombuffer((ctypes.c_char * (amount * dtype.itemsize)).from_address(address), dtype=dtype)


def _move(of_ranks: Sequence[Sequence[Step]]) -> None:
    """Carries out one call: the steps of all ranks; sends match receives in their order."""
    kinds = [[step for step in steps if step.kind not in ("send", "recv")] for steps in of_ranks]
    for same in zip(*kinds, strict=True):
        _collective(same)
    queues: dict[tuple[int, int], list[Step]] = {}
    for rank, steps in enumerate(of_ranks):
        for step in steps:
            if step.kind == "send":
                queues.setdefault((rank, step.peer), []).append(step)
    for rank, steps in enumerate(of_ranks):
        for step in steps:
            if step.kind == "recv":
                sent = queues[step.peer, rank].pop(0)
                _write(step.target, _bytes_at(sent.source, sent.amount).copy())
    assert not any(queues.values())


def _collective(same: Sequence[Step]) -> None:
    first = same[0]
    assert {(s.kind, s.amount, s.element, s.reduction, s.peer) for s in same} == {
        (first.kind, first.amount, first.element, first.reduction, first.peer)
    }
    if first.kind == "broadcast":
        data = _view(same[first.peer].source, first.amount, first.element).copy()
        for step in same:
            _write(step.target, data)
        return
    if first.kind == "all_gather":
        whole = np.concatenate([_view(s.source, s.amount, s.element) for s in same])
        for step in same:
            _write(step.target, whole)
        return
    amount = first.amount * (len(same) if first.kind == "reduce_scatter" else 1)
    total = _SUMS[first.reduction]([_view(s.source, amount, s.element) for s in same])
    for rank, step in enumerate(same):
        if first.kind == "all_reduce" or (first.kind == "reduce" and rank == first.peer):
            _write(step.target, total)
        elif first.kind == "reduce_scatter":
            _write(step.target, total[rank * first.amount : (rank + 1) * first.amount])


def _write(address: int, data: np.ndarray) -> None:
    ctypes.memmove(address, np.ascontiguousarray(data).ctypes.data, data.nbytes)
