"""A member's part in a probe: small transfers to and from others over links of their own, beside training."""

from __future__ import annotations

import array
import logging
import threading
from collections.abc import Callable
from functools import partial

from keepstep.errors import KeepstepError
from keepstep.records.watch_messages import LinkProbed, ProbeLinks
from keepstep.training.fabric import Fabric
from keepstep.training.links import Channel
from keepstep.training.plane import Call, Lane, Op, Status

__all__ = ["PROBE_GROUP", "LinkProbe"]

PROBE_GROUP = "keepstep.probe"
_TRANSFER_S = 15.0
_ECHOES = 5
_BULKS = 3
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
            channel = self._fabric.channel(PROBE_GROUP, Lane.P2P, ranks=self._fabric.ranks)
            for number, (source, destination) in enumerate(order.pairs):
                tag = order.finding * 1000 + number
                try:
                    if own == source:
                        self._report(self._send(channel, destination, finding=order.finding, tag=tag, nbytes=nbytes))
                    elif own == destination:
                        self._answer(channel, source, tag=tag, nbytes=nbytes)
                except KeepstepError as error:
                    _log.warning("probe from rank %d to rank %d: %s", source, destination, error)

    def _send(self, channel: Channel, to: int, *, finding: int, tag: int, nbytes: int) -> LinkProbed:
        """Echoes of one byte (the first one makes the link), then the bulk. The best time counts: training goes on."""
        own = self._fabric.rank
        small, bulk = array.array("B", bytes(1)), array.array("B", bytes(nbytes))
        move = partial(self._move, channel, peer=to, tag=tag)
        times: list[float] = []
        for _ in range(_ECHOES):
            begun = self._clock()
            if not (move(Op.SEND, buffer=small) and move(Op.RECV, buffer=small)):
                return LinkProbed(finding, own, to, 0.0, 0.0, f"no echo within {_TRANSFER_S:.0f} s")
            times.append(self._clock() - begun)
        best = 0.0
        for _ in range(_BULKS):
            begun = self._clock()
            if not (move(Op.SEND, buffer=bulk) and move(Op.RECV, buffer=small)):
                return LinkProbed(finding, own, to, min(times), best, f"no transfer within {_TRANSFER_S:.0f} s")
            took = self._clock() - begun
            best = max(best, nbytes / max(took - min(times), took / 2, 1e-9))
        return LinkProbed(finding, own, to, min(times), best)

    def _answer(self, channel: Channel, source: int, *, tag: int, nbytes: int) -> None:
        small, bulk = array.array("B", bytes(1)), array.array("B", bytes(nbytes))
        for buffer in (*[small] * _ECHOES, *[bulk] * _BULKS):
            if not self._move(channel, Op.RECV, peer=source, tag=tag, buffer=buffer):
                return
            if not self._move(channel, Op.SEND, peer=source, tag=tag, buffer=small):
                return

    def _move(self, channel: Channel, op: Op, *, peer: int, tag: int, buffer: array.array[int]) -> bool:
        """One message; False if it did not come through in time."""
        span = [buffer.buffer_info()]
        call = Call(op, peer=channel.index[peer], tag=tag, timeout_s=_TRANSFER_S)
        call.inputs, call.outputs = (span, ()) if op is Op.SEND else ((), span)
        ticket = channel.submit(call)
        status = channel.plane.wait(ticket, _TRANSFER_S + 5.0)
        channel.plane.release(ticket)
        return status is Status.DONE
