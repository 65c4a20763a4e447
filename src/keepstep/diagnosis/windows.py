"""The last steps of every rank as arrays: rank by step, so that 16,384 ranks are compared in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keepstep.records.summary import MemberSummary
from keepstep.records.summary_rows import STEP_ROW, unpacked

__all__ = ["COLUMNS", "METRICS", "History", "Numbers", "expanded"]

Numbers: TypeAlias = NDArray[Any]

COLUMNS = 128
"""Steps that are remembered."""

METRICS = ("duration_us", "own_us", "data_us", "cpu_us", "delay_us")
"""What is remembered of a step of a rank, in us; the last two are a window's total spread over its steps."""

_FROM_ROWS = METRICS[:3]


@dataclass
class History:
    """`values[metric][rank, step % COLUMNS]`, valid where `stamp` there is the step; -1: nothing.

    `latest` is the newest step of each rank (-1: none). `ratio` and `excess` are filled by the slow tests for steps
    that every rank has told: log(own time / that of its role), and the difference in us. `done` is the newest of them.
    """

    world: int
    values: dict[str, Numbers]
    stamp: Numbers
    latest: Numbers
    ratio: Numbers
    excess: Numbers
    extra_data: Numbers
    judged: Numbers
    done: int = -1

    @classmethod
    def empty(cls, world: int) -> History:
        """Nothing known of `world` ranks."""
        shape = (world, COLUMNS)
        values = {name: np.zeros(shape, np.float32) for name in METRICS}
        ratio, excess, extra = (np.zeros(shape, np.float32) for _ in range(3))
        stamp = np.full(shape, -1, np.int64)
        return cls(
            world, values, stamp, np.full(world, -1, np.int64), ratio, excess, extra, np.full(COLUMNS, -1, np.int64)
        )

    def take(self, windows: Sequence[MemberSummary]) -> None:
        """Remember the steps of `windows`; ranks outside the world are left out. Raises RecordError for torn rows."""
        windows = [window for window in windows if 0 <= window.rank < self.world]
        if not windows:
            return
        ranks = np.fromiter((window.rank for window in windows), np.int64, len(windows))
        rows = unpacked([window.steps for window in windows], STEP_ROW)
        counts = np.fromiter((len(window.steps) // STEP_ROW.itemsize for window in windows), np.int64, len(windows))
        firsts = np.fromiter((window.first_step for window in windows), np.int64, len(windows))
        lasts = np.fromiter((window.last_step for window in windows), np.int64, len(windows))
        steps, source = expanded(rows["step"].astype(np.int64), counts, firsts=firsts)
        of_window = np.repeat(np.arange(len(windows)), counts)[source]
        at = (ranks[of_window], steps % COLUMNS)
        self.stamp[at] = steps
        for name in _FROM_ROWS:
            self.values[name][at] = rows[name][source]
        per_step = 1.0 / np.maximum(lasts - firsts + 1, 1)
        for name, field in (("cpu_us", "cpu_us"), ("delay_us", "run_delay_us")):
            total = np.fromiter((getattr(window, field) for window in windows), np.float64, len(windows))
            self.values[name][at] = (total * per_step)[of_window]
        np.maximum.at(self.latest, ranks, lasts)

    def columns(self, last: int, count: int) -> Numbers:
        """The columns of the `count` steps up to `last`, oldest first; fewer near the beginning."""
        return np.arange(max(0, last - count + 1), last + 1) % COLUMNS

    def whole(self, last: int, count: int) -> Numbers:
        """Which ranks have told each of the `count` steps up to `last`."""
        steps = np.arange(max(0, last - count + 1), last + 1)
        known: Numbers = (self.stamp[:, steps % COLUMNS] == steps).all(axis=1)
        return known

    def of(self, metric: str, last: int, *, count: int) -> Numbers:
        """A metric of all ranks over the `count` steps up to `last`: rank by step."""
        picked: Numbers = self.values[metric][:, self.columns(last, count)]
        return picked

    def forget(self) -> None:
        """A new membership: steps may come again, and what was told before them no longer lines up."""
        self.stamp[:] = -1
        self.latest[:] = -1
        self.judged[:] = -1
        self.done = -1


def expanded(steps: Numbers, counts: Numbers, *, firsts: Numbers) -> tuple[Numbers, Numbers]:
    """(the steps that rows cover, the row of each): a row of block-averaged steps stands for each step of its block.

    `counts` are the rows of each window, `firsts` its first step. At most the last `COLUMNS` steps of a row count.
    """
    before = np.empty_like(steps)
    before[1:] = steps[:-1]
    starts = np.cumsum(counts) - counts
    filled = counts > 0
    before[starts[filled]] = firsts[filled] - 1
    length = np.clip(steps - before, 1, COLUMNS)
    source = np.repeat(np.arange(len(steps)), length)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(length) - length, length)
    return steps[source] - length[source] + 1 + offset, source
