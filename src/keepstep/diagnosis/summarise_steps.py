"""The steps of one member: where each began and ended, and what its time went into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keepstep.diagnosis.summarise_slots import Slots, Table
from keepstep.records.ring import SpanKind
from keepstep.records.summary_rows import STEP_ROW

__all__ = ["MAX_STEP_ROWS", "Steps", "cut_steps", "step_rows"]

MAX_STEP_ROWS = 12
"""Most rows of one window; of more steps neighbours are averaged."""

_DONE = 2
_Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Steps:
    """Whole steps in order: their numbers, begin and end (ns, the member's monotonic clock), and how long the gap
    before each was (0: unknown). The steps do not overlap."""

    numbers: _Numbers
    begins: _Numbers
    ends: _Numbers
    gaps: _Numbers


def cut_steps(slots: Slots, generation: int, *, after: int, last_end: int) -> Steps:
    """The steps behind step `after` that are over, by the STEP spans; where there are none, by the calls.

    Without spans a step lasts from its first call to the first call of the next one. `last_end` is the end of step
    `after` in ns (0: unknown). Of a step that was done twice the last time counts.
    """
    spans = slots.spans[(slots.spans["op"] == SpanKind.STEP) & (slots.spans["generation"] == generation)]
    if len(spans):
        over = spans[(spans["ended_ns"] > 0) & (spans["status"] == _DONE) & (spans["step"] > after)]
        numbers, at = np.unique(over["step"][::-1], return_index=True)
        over = over[::-1][at]
        begins, ends = over["began_ns"].astype(np.int64), over["ended_ns"].astype(np.int64)
    else:
        numbers, begins, ends = _by_calls(slots.operations, generation, after=after)
    before = np.concatenate([[last_end], ends[:-1]]) if len(ends) else ends
    gaps = np.where(before > 0, np.maximum(begins - before, 0), 0)
    return Steps(numbers, begins, ends, gaps)


def _by_calls(operations: Table, generation: int, *, after: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    calls = operations[(operations["generation"] == generation) & (operations["step"] > after)]
    if not len(calls):
        return tuple(np.zeros(0, np.int64) for _ in range(3))
    order = np.argsort(calls["step"], kind="stable")
    numbers, first = np.unique(calls["step"][order], return_index=True)
    begins = np.minimum.reduceat(calls["started_ns"][order].astype(np.int64), first)
    return numbers[:-1], begins[:-1], begins[1:]


def step_rows(slots: Slots, steps: Steps) -> Table:
    """One STEP_ROW for each of `steps`, or for each block of neighbours where there are too many of them."""
    calls = slots.operations[slots.operations["finished_ns"] > 0]
    over = slots.spans[slots.spans["ended_ns"] > 0]
    data = over[over["op"] == SpanKind.DATA]
    quiet = over[(over["op"] == SpanKind.DATA) | (over["op"] == SpanKind.CHECKPOINT)]
    taken = _covered(
        np.concatenate([calls["started_ns"], quiet["began_ns"]]),
        np.concatenate([calls["finished_ns"], quiet["ended_ns"]]),
        steps=steps,
    )
    lasted = steps.ends - steps.begins
    inside = _covered(data["began_ns"], data["ended_ns"], steps=steps)
    gap = Steps(steps.numbers, steps.begins - steps.gaps, steps.begins, steps.gaps)
    ahead = _covered(data["began_ns"], data["ended_ns"], steps=gap)
    rows = np.zeros(len(steps.numbers), STEP_ROW)
    rows["step"] = steps.numbers
    rows["duration_us"] = lasted / 1e3
    rows["own_us"] = np.maximum(lasted - taken, 0) / 1e3
    rows["data_us"] = (inside + ahead) / 1e3
    return _thinned(rows)


def _covered(begins: _Numbers, ends: _Numbers, *, steps: Steps) -> _Numbers:
    """For each step, how many of its ns at least one of the stretches `begins` to `ends` covers.

    An interval that reaches over several steps counts in each. Steps are disjoint and in order of time.
    """
    covered = np.zeros(len(steps.numbers))
    if not len(begins) or not len(steps.numbers):
        return covered
    order = np.argsort(begins, kind="stable")
    start, stop = begins[order].astype(np.int64), np.maximum.accumulate(ends[order].astype(np.int64))
    start[1:] = np.maximum(start[1:], stop[:-1])
    held = np.maximum(stop - start, 0)
    total = np.concatenate([[0], np.cumsum(held)])
    return _before(steps.ends, start, stop=stop, total=total) - _before(steps.begins, start, stop=stop, total=total)


def _before(moment: _Numbers, start: _Numbers, *, stop: _Numbers, total: _Numbers) -> _Numbers:
    """How many ns before each `moment` the disjoint, sorted stretches cover; `total` are their running sums."""
    count = np.searchsorted(start, moment, side="right")
    last = np.maximum(count - 1, 0)
    excess = np.where(count > 0, np.maximum(stop[last] - np.maximum(moment, start[last]), 0), 0)
    return total[count] - excess


def _thinned(rows: Table) -> Table:
    """At most `MAX_STEP_ROWS`: blocks of neighbours, with the number of their last step and their mean times."""
    block = -(-len(rows) // MAX_STEP_ROWS)
    if block <= 1:
        return rows
    first = np.arange(0, len(rows), block)
    count = np.diff([*first, len(rows)])
    thin = np.zeros(len(first), STEP_ROW)
    thin["step"] = rows["step"][first + count - 1]
    for name in STEP_ROW.names[1:]:
        thin[name] = np.add.reduceat(rows[name], first) / count
    return thin
