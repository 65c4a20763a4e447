"""A member's part in a probe: small transfers to and from others over links of their own, beside training."""

from __future__ import annotations

import array
import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

from keepstep.errors import KeepstepError
from keepstep.records.watch_messages import LinkProbed, ProbeLinks
from keepstep.training.fabric import Fabric
from keepstep.training.links import Channel
from keepstep.training.plane import Call, Lane, Op, Status

__all__ = ["PROBE_GROUP", "LinkProbe", "turns_of"]

PROBE_GROUP = "keepstep.probe"
_TRANSFER_S = 15.0
_ECHOES = 5
_TRIES = 2
_FIRST_BYTES = 1 << 10
_GROWTH = 32
_SHOWS_S = 0.25
"""Transfers grow up to the size that was asked for; where one takes so long, larger ones would hold training up."""
_MOST_BYTES = 64 << 20
_log = logging.getLogger("keepstep")


class LinkProbe:
    """Takes orders in any thread, works in one of its own. `clock` gives seconds, `report` takes what was measured."""

    def __init__(self, fabric: Fabric, *, clock: Callable[[], float], report: Callable[[LinkProbed], None]) -> None:
        self._fabric = fabric
        self._clock = clock
        self._report = report
        self._one_at_a_time = threading.Lock()

    def take(self, order: ProbeLinks) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._run, args=(order,), name="keepstep-probe", daemon=True).start()

    def _run(self, order: ProbeLinks) -> None:
        own, nbytes = self._fabric.rank, max(1, min(order.nbytes, _MOST_BYTES))
        with self._one_at_a_time:
            begun = self._clock()
            channel = self._fabric.channel(PROBE_GROUP, Lane.P2P, ranks=self._fabric.ranks)
            turns = turns_of(order.pairs)
            for number, (source, destination) in enumerate(order.pairs):
                tag = order.finding * 1000 + number
                try:
                    if own == source:
                        self._report(self._send(channel, destination, finding=order.finding, tag=tag, nbytes=nbytes))
                    elif own == destination:
                        until = begun + _TRANSFER_S * turns[number]
                        self._answer(channel, source, tag=tag, sizes=_sizes(nbytes), until=until)
                except KeepstepError as error:
                    _log.warning("probe from rank %d to rank %d: %s", source, destination, error)

    def _send(self, channel: Channel, to: int, *, finding: int, tag: int, nbytes: int) -> LinkProbed:
        """Echoes of one byte (the first one makes the link), then bulks, each behind a byte that says which one comes.

        The best time counts: training goes on.
        """
        own, until = self._fabric.rank, self._clock() + _TRANSFER_S
        small = array.array("B", bytes(1))
        move = partial(self._move, channel, peer=to, tag=tag, until=until)
        times: list[float] = []
        for _ in range(_ECHOES):
            begun = self._clock()
            if not (move(Op.SEND, buffer=small) and move(Op.RECV, buffer=small)):
                return LinkProbed(finding, own, to, 0.0, 0.0, f"no echo within {_TRANSFER_S:.0f} s")
            times.append(self._clock() - begun)
        best = 0.0
        for number, size in enumerate(_sizes(nbytes), 1):
            bulk, shortest = array.array("B", bytes(size)), math.inf
            for _ in range(_TRIES):
                if not move(Op.SEND, buffer=array.array("B", [number])):
                    return LinkProbed(finding, own, to, min(times), best, f"no transfer within {_TRANSFER_S:.0f} s")
                begun = self._clock()
                if not (move(Op.SEND, buffer=bulk) and move(Op.RECV, buffer=small)):
                    return LinkProbed(finding, own, to, min(times), best, f"no transfer within {_TRANSFER_S:.0f} s")
                took = self._clock() - begun
                shortest = min(shortest, took)
                best = max(best, size / max(took - min(times), took / 2, 1e-9))
            if shortest > _SHOWS_S:
                break
        move(Op.SEND, buffer=array.array("B", [0]))
        return LinkProbed(finding, own, to, min(times), best)

    def _answer(self, channel: Channel, source: int, *, tag: int, sizes: Sequence[int], until: float) -> None:
        """The other end of `_send`; `until` is when the sender is done at the latest, earlier pairs included."""
        small = array.array("B", bytes(1))
        move = partial(self._move, channel, peer=source, tag=tag, until=until)
        for _ in range(_ECHOES):
            if not (move(Op.RECV, buffer=small) and move(Op.SEND, buffer=small)):
                return
        while move(Op.RECV, buffer=small) and 0 < small[0] <= len(sizes):
            bulk = array.array("B", bytes(sizes[small[0] - 1]))
            if not (move(Op.RECV, buffer=bulk) and move(Op.SEND, buffer=small)):
                return

    def _move(self, channel: Channel, op: Op, *, peer: int, tag: int, until: float, buffer: array.array[int]) -> bool:
        """One message; False if it did not come through in time."""
        left = until - self._clock()
        if left <= 0:
            return False
        span = [buffer.buffer_info()]
        call = Call(op, peer=channel.index[peer], tag=tag, timeout_s=left)
        call.inputs, call.outputs = (span, ()) if op is Op.SEND else ((), span)
        ticket = channel.submit(call)
        status = channel.plane.wait(ticket, left + 5.0)
        channel.plane.release(ticket)
        return status is Status.DONE


def turns_of(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """How many pairs are done, one after the other, by the end of each: a rank takes part in one at a time."""
    busy: dict[int, int] = {}
    turns = []
    for source, destination in pairs:
        turn = 1 + max(busy.get(source, 0), busy.get(destination, 0))
        busy[source] = busy[destination] = turn
        turns.append(turn)
    return turns


def _sizes(nbytes: int) -> list[int]:
    """Sizes of the bulks, from small to `nbytes`."""
    sizes = [_FIRST_BYTES]
    while sizes[-1] * _GROWTH < nbytes:
        sizes.append(sizes[-1] * _GROWTH)
    return [nbytes] if nbytes <= _FIRST_BYTES else [*sizes, nbytes]
