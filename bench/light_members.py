"""Members without torch for `swap_scale.py`: many in one process, each with real sockets and threads of its own.

A host process obeys one order after the other, given over a pipe; each is carried out by all of its members at once.
"""

from __future__ import annotations

import array
import os
import queue
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from keepstep.records.messages import Address
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status
from keepstep.training.turning import Move
from keepstep.training.watch import watch_peers

__all__ = ["Cost", "host"]

GROUP, FLOATS = "g", 1024
LIMIT_S = 120.0
_TCP_INFO_BYTES, _DATA_SEGMENTS_OUT = 192, 156
_SECRET = b"s" * 32


class Cost(NamedTuple):
    """What one order took in one host: processor seconds, wall seconds."""

    cpu_s: float
    wall_s: float


class Seat:
    """One member and the thread that makes its calls."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.orders: queue.SimpleQueue[tuple[Callable[[Fabric], object], queue.SimpleQueue[object]] | None]
        self.orders = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (order := self.orders.get()) is not None:
            work, answers = order
            try:
                answers.put(work(self.fabric))
            except Exception as error:  # noqa: BLE001  told to the driver, which ends the benchmark
                answers.put(error)


def reduce(fabric: Fabric) -> None:
    """The collective of a step: 4 KiB, summed over all members. Raises RuntimeError if it fails."""
    channel = fabric.channel(GROUP, Lane.COLLECTIVE, ranks=fabric.ranks)
    values = array.array("f", [1.0]) * FLOATS
    buffer = (values.buffer_info()[0], 4 * FLOATS)
    call = Call(Op.ALL_REDUCE, Element.FLOAT32, Reduction.SUM, inputs=[buffer], outputs=[buffer], inline=True)
    ticket = channel.submit(call)
    status = channel.plane.wait(ticket, LIMIT_S)
    channel.plane.release(ticket)
    if status is not Status.DONE or values[-1] != fabric.world:
        raise RuntimeError(f"rank {fabric.rank}: {status.name}, {values[-1]}")


def step(fabric: Fabric) -> None:
    """A step and its boundary. Raises RuntimeError if it was not agreed."""
    reduce(fabric)
    if not fabric.agreement():
        raise RuntimeError(f"rank {fabric.rank}: no agreement")
    fabric.turn()


def segments_out() -> dict[int, int]:
    """TCP segments with data sent so far, by inode of each connection of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            found[status.st_ino] = struct.unpack_from("I", info, _DATA_SEGMENTS_OUT)[0]
        except OSError:
            continue
    return found


class Host:
    """The members of one process: ranks `number`, `number + hosts`, ... of a world."""

    def __init__(self, number: int, hosts: int, world: int) -> None:
        self.number, self.world = number, world
        self.ranks = list(range(number, world, hosts))
        self.doors = {rank: Doors(f"m{rank}", f"node{rank}") for rank in self.ranks}
        self.seats: dict[int, Seat] = {}
        self.joiners: dict[int, Fabric] = {}
        self.gone: list[Fabric] = []
        self.roster: dict[int, Address] = {}

    def addresses(self) -> dict[int, Address]:
        """Where the members are reached."""
        return {rank: doors.address for rank, doors in self.doors.items()}

    def begin(self, roster: dict[int, Address]) -> None:
        """Makes the fabrics."""
        self.roster = roster
        for rank, doors in self.doors.items():
            self.seats[rank] = Seat(self._fabric(rank, doors))

    def _fabric(self, rank: int, doors: Doors, generation: int = 1) -> Fabric:
        place = Place(rank, self.world, generation)
        return Fabric(doors, place, secret=_SECRET, directory=RosterDirectory(self.roster), protected=True)

    def everywhere(self, work: Callable[[Fabric], object]) -> list[object]:
        """`work` by all members at once. Raises what one of them raised."""
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        for seat in self.seats.values():
            seat.orders.put((work, answers))
        found = [answers.get(timeout=LIMIT_S) for _ in self.seats]
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    # ------------------------------------------------------------------ orders

    def steps(self, count: int) -> None:
        """Normal steps."""
        for _ in range(count):
            self.everywhere(step)

    def watch(self) -> None:
        """Has all watch links made."""
        self.everywhere(Fabric.start_watch)
        self.everywhere(_await_watch)

    def renew(self, generation: int) -> None:
        """A full re-initialisation: every link and watch link is made anew, and a step is made over them."""
        self.everywhere(lambda fabric: fabric.install(generation, self.roster, renew=True))
        self.everywhere(step)
        self.everywhere(_await_watch)

    def poison(self) -> None:
        """Ends all calls, as a loss does."""
        self.everywhere(Fabric.poison)

    def join(self, ranks: Sequence[int], generation: int) -> dict[int, Address]:
        """Starts joiners for those of `ranks` that live here."""
        for rank in set(ranks) & set(self.ranks):
            self.doors[rank] = Doors(f"m{rank}.{generation}", f"joiner{rank}.{generation}")
            self.joiners[rank] = self._fabric(rank, self.doors[rank], generation - 1)
            self.joiners[rank].go_local()
        return {rank: fabric.address for rank, fabric in self.joiners.items()}

    def prepare(self, move: Move) -> None:
        """All members prepare `move`, beside the steps. Raises RuntimeError if one cannot."""
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        for rank, seat in self.seats.items():
            leaving = rank in move.ranks
            seat.fabric.prepare_move(move._replace(leaving=leaving), ready=told.put)
            if leaving:
                seat.fabric.turning.ready(move.number)
                told.put("")
        for _ in self.seats:
            why = told.get(timeout=LIMIT_S)
            if why:
                raise RuntimeError(why)

    def commit(self, move: Move) -> tuple[float, float]:
        """The leavers commit; all make a step, whose boundary makes the move. When the last member here had agreed, and
        when the last one had its new generation, in seconds of this machine's clock."""
        for rank in move.ranks:
            if rank in self.seats:
                self.seats[rank].fabric.turning.commit(move.number)
        self.roster = {**self.roster, **move.ranks}
        stamps: list[Any] = self.everywhere(self._step_and_move)
        for rank, joiner in self.joiners.items():
            self.gone.append(self.seats[rank].fabric)
            self.seats[rank].orders.put(None)
            self.seats[rank] = Seat(joiner)
        self.joiners = {}
        return max(agreed for agreed, _ in stamps), max(installed for _, installed in stamps)

    def _step_and_move(self, fabric: Fabric) -> tuple[float, float]:
        reduce(fabric)
        if not fabric.agreement():
            raise RuntimeError(f"rank {fabric.rank}: no agreement")
        agreed = time.perf_counter()
        vote = fabric.turn().move
        if vote is None or not vote.passed:
            raise RuntimeError(f"rank {fabric.rank}: the move was not made: {vote}")
        if fabric.rank in vote.ranks:
            fabric.stand_down()
            self.joiners[fabric.rank].install_move(vote, roster=self.roster)
        else:
            fabric.install_move(vote)
        return agreed, time.perf_counter()

    def clean(self) -> None:
        """The leavers end."""
        while self.gone:
            self.gone.pop().close()

    def counts(self) -> tuple[dict[int, int], int]:
        """Segments sent by connection, and the most sockets of one member (links, watch links, two listeners)."""
        return segments_out(), max(len(seat.fabric.inodes()) + 2 for seat in self.seats.values())


def _await_watch(fabric: Fabric) -> None:
    wanted = watch_peers(fabric.rank, fabric.ranks)
    end = time.monotonic() + LIMIT_S
    while not wanted <= fabric.watched:
        if time.monotonic() > end:
            raise RuntimeError(f"rank {fabric.rank} has no watch links to {sorted(wanted - fabric.watched)}")
        time.sleep(0.05)


def host(number: int, hosts: int, *, world: int, pipe: Connection) -> None:
    """The process: obeys orders `(method, arguments)` until the driver ends; answers `(result, Cost)`, or why not."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    threading.stack_size(256 * 1024)
    sys.setswitchinterval(0.05)  # many threads that wait for one interpreter lock wake each other less
    one = Host(number, hosts, world)
    pipe.send((one.addresses(), Cost(0.0, 0.0)))
    while (order := _next_order(pipe)) is not None:
        method, arguments = order
        before, begin = _cpu_s(), time.perf_counter()
        answer: Any
        try:
            result = getattr(one, method)(*arguments)
            answer = (result, Cost(_cpu_s() - before, time.perf_counter() - begin))
        except (RuntimeError, OSError, queue.Empty) as error:
            answer = f"{method}: {type(error).__name__}: {error}"
        pipe.send(answer)
    os._exit(0)  # a thousand good-byes would measure nothing


def _next_order(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
