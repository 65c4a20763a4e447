"""The analysis process: `python -m keepstep.service.analysis_process` runs the pure state machine over a pipe.

A process of its own, so that no analysis delays a decision and its death loses nothing: what is open is given to the
next one. It reads no clock and no file, and ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from keepstep.diagnosis.baseline import Baseline
from keepstep.diagnosis.earlier_run import not_compared
from keepstep.diagnosis.live import LiveFinding, Watch, WatchPlan, baseline_of, begin_watch, observe, retire
from keepstep.diagnosis.plain import PlainChange, PlainWatch
from keepstep.service.analysis_wire import (
    LENGTH,
    MAX_FRAME_BYTES,
    Begin,
    Look,
    Seen,
    Standing,
    decode_frame,
    framed,
)
from keepstep.service.arrivals import judged

__all__ = ["Analysis", "main"]

_NICE = 5
_BASELINE_EVERY = 100
_START = "start:"
_PLAIN = "plain:"
_OTHERS = (_START, _PLAIN, "earlier:")
"""How the keys of findings begin that are not the live analysis's own."""


class Analysis:
    """The state of one job's analysis."""

    def __init__(self, begin: Begin) -> None:
        """Goes on with the findings that are open. A baseline that cannot be read is left out."""
        baseline: Baseline | None = None
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            baseline = msgspec.msgpack.decode(begin.baseline, type=Baseline) if begin.baseline else None
        self._world = begin.world
        self._earlier = (begin.earlier, baseline) if baseline is not None else None
        self._starts = {one.key: one.finding for one in begin.open if one.key.startswith(_START)}
        live = tuple(_live(standing) for standing in begin.open if not standing.key.startswith(_OTHERS))
        self._state: Watch = begin_watch(
            WatchPlan(world=begin.world, job=begin.job, baseline=baseline, open=live, hang_s=begin.hang_s)
        )
        plain = tuple(_plain(standing) for standing in begin.open if standing.key.startswith(_PLAIN))
        self._plain = PlainWatch(begin.world, hang_s=begin.hang_s, open=plain)
        self._looks = 0

    def look(self, look: Look) -> Seen:
        """What follows from one look."""
        self._state = retire(self._state, look.retired, now=look.now)
        self._state, changes = observe(self._state, look.reports, now=look.now)
        standing = [_standing(change) for change in changes]
        standing += [_standing(change) for change in self._plain.observe(look.plain, look.now)]
        standing += self._arrivals(look)
        self._looks += 1
        now = baseline_of(self._state) if self._looks % _BASELINE_EVERY == 0 else None
        if now is None or not now.fingerprint.layout:  # members that close have no groups any more
            return Seen(tuple(standing))
        return Seen((*standing, *self._next_to_earlier(now)), msgspec.msgpack.encode(now))

    def _next_to_earlier(self, now: Baseline) -> list[Standing]:
        """Said once: that this run is not compared with the one before, where that is so."""
        earlier, self._earlier = self._earlier, None
        if earlier is None or (finding := not_compared(earlier[1], now.fingerprint, run=earlier[0])) is None:
            return []
        return [Standing(f"earlier:{earlier[0]}", "new", finding)]

    def _arrivals(self, look: Look) -> list[Standing]:
        """Start-up findings; one that does not come again has ended.

        Without arrivals the start is over, for good or bad: which of the two is for others to say.
        """
        found = judged(look.arrivals, self._world, now=look.now) if look.arrivals else {}
        before, self._starts = self._starts, found
        gone = [
            Standing(key, "ended", finding) for key, finding in before.items() if look.arrivals and key not in found
        ]
        return [*gone, *(Standing(key, "new", finding) for key, finding in found.items() if key not in before)]


def _live(standing: Standing) -> LiveFinding:
    return msgspec.convert(msgspec.structs.asdict(standing), LiveFinding)


def _plain(standing: Standing) -> PlainChange:
    return PlainChange(standing.key, standing.status, standing.finding, standing.hard)


def _standing(change: LiveFinding | PlainChange) -> Standing:
    began = change.began_step if isinstance(change, LiveFinding) else None
    return Standing(change.key, change.status, change.finding, began, change.hard)


def main() -> int:
    """Answer frames until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    analysis: Analysis | None = None
    while (data := _frame(read)) is not None:
        message = decode_frame(data)
        answer = Seen()
        if isinstance(message, Begin):
            analysis = Analysis(message)
        elif isinstance(message, Look) and analysis is not None:
            answer = analysis.look(message)
        write.write(framed(answer))
        write.flush()
    return 0


def _frame(read: BinaryIO) -> bytes | None:
    head = read.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = read.read(length) if length <= MAX_FRAME_BYTES else b""
    return data if len(data) == length else None


if __name__ == "__main__":
    sys.exit(main())
