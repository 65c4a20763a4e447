"""ETTR as it was: productive time over wall-clock of job runs, from the ledger, by any grouping. Pure.

Productive is the time under `kept_step`; wall-clock is waiting plus allocated time (Meta, HPCA 2025, section 4).
Data loading, compilation, validation and start-up count as occupied and not as productive.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.attempt_arrays import UNKNOWN, AttemptArrays

__all__ = ["EttrCell", "RunTimes", "ettr_cells", "run_times", "waits"]


class RunTimes(msgspec.Struct, frozen=True):
    """One entry a job run: most GPUs and nodes of its lives; waited, allocated and productive wall-clock [us], and the
    same times the GPUs of each life (`gpu_...`, GPU-hours), which need not be the same in all.

    `first` is the place of its first life among the attempts, `lives` how many it had; `start` and `end` in us since
    1970, `submit` may be `UNKNOWN`.
    """

    run: Any
    first: Any
    lives: Any
    gpus: Any
    nodes: Any
    waited: Any
    allocated: Any
    productive: Any
    gpu_waited: Any
    gpu_allocated: Any
    gpu_productive: Any
    submit: Any
    start: Any
    end: Any


def waits(attempts: AttemptArrays) -> Any:
    """Wait before each life [us]; -1 where not known.

    A life that the scheduler started again (same job number as the life before) waited since that one ended: Slurm
    rewrites its time of submission. Every other waited since it was eligible (or, if that is not known, submitted).
    """
    asked = np.where(attempts.eligible != UNKNOWN, attempts.eligible, attempts.submit)
    if len(asked):
        before = np.append(0, np.arange(len(asked) - 1))
        requeued = (attempts.run == attempts.run[before]) & (attempts.job == attempts.job[before])
        requeued[0] = False
        asked = np.where(requeued & (attempts.job != UNKNOWN), attempts.end[before], asked)
    known = asked != UNKNOWN
    return np.where(known, np.maximum(attempts.start - np.where(known, asked, attempts.start), 0), -1)


def run_times(attempts: AttemptArrays, productive: Any) -> RunTimes:
    """Add up lives; `productive` is the kept time of each attempt [us]."""
    if not len(attempts.run):
        return RunTimes(*(np.empty(0, np.int64) for _ in RunTimes.__struct_fields__))
    first = np.flatnonzero(np.append(True, attempts.run[1:] != attempts.run[:-1]))
    waited, kept = np.maximum(waits(attempts), 0), np.asarray(productive, np.int64)
    weight = attempts.gpus / 3.6e9
    return RunTimes(
        run=attempts.run[first],
        first=first,
        lives=np.diff(np.append(first, len(attempts.run))),
        gpus=np.maximum.reduceat(attempts.gpus, first),
        nodes=np.maximum.reduceat(attempts.nodes, first),
        waited=np.add.reduceat(waited, first),
        allocated=np.add.reduceat(attempts.length, first),
        productive=np.add.reduceat(kept, first),
        gpu_waited=np.add.reduceat(waited * weight, first),
        gpu_allocated=np.add.reduceat(attempts.length * weight, first),
        gpu_productive=np.add.reduceat(kept * weight, first),
        submit=attempts.submit[first],
        start=attempts.start[first],
        end=np.maximum.reduceat(attempts.end, first),
    )


class EttrCell(msgspec.Struct, frozen=True):
    """One group: `of_sums` is sum(productive x GPUs) / sum(wall-clock x GPUs), `mean_of_ratios` the mean over runs.

    [`low`, `high`] is the bootstrap interval of the ratio of sums over runs. `wait_share` is the share of wall-clock
    spent waiting, also weighted by GPUs.
    """

    group: str
    runs: int
    gpu_hours: float
    of_sums: float
    low: float
    high: float
    mean_of_ratios: float
    wait_share: float


def ettr_cells(
    times: RunTimes, group: Any, *, names: tuple[str, ...], rng: np.random.Generator, rounds: int = 400
) -> tuple[EttrCell, ...]:
    """The measured ratio for each group number that occurs; `names` says what a number means.

    Runs without any wall-clock are left out. The interval is a bootstrap over runs; for groups above 300 runs it is
    the linearised standard error of a ratio (Cochran 1977, section 6.4), which the bootstrap converges to.
    """
    wall = times.gpu_waited + times.gpu_allocated
    alive = np.flatnonzero(wall > 0)
    order = alive[np.argsort(np.asarray(group)[alive], kind="stable")]
    if not len(order):
        return ()
    numbers, firsts = np.unique(np.asarray(group)[order], return_index=True)
    cells = []
    for number, members in zip(numbers, np.split(order, firsts[1:]), strict=True):
        good, whole = times.gpu_productive[members], wall[members]
        low, high = _interval(good, whole, rng=rng, rounds=rounds)
        cells.append(
            EttrCell(
                group=names[int(number)] or "(none)",
                runs=len(members),
                gpu_hours=float(times.gpu_allocated[members].sum()),
                of_sums=float(good.sum() / whole.sum()),
                low=low,
                high=high,
                mean_of_ratios=float((good / whole).mean()),
                wait_share=float(times.gpu_waited[members].sum() / whole.sum()),
            )
        )
    return tuple(cells)


_DRAWN_UP_TO = 300


def _interval(good: Any, whole: Any, *, rng: np.random.Generator, rounds: int) -> tuple[float, float]:
    count = len(good)
    ratio = good.sum() / whole.sum()
    if count == 1:
        return float("nan"), float("nan")
    if count > _DRAWN_UP_TO:
        error = np.sqrt(((good - ratio * whole) ** 2).sum() * count / (count - 1)) / whole.sum()
        return max(float(ratio - 1.96 * error), 0.0), min(float(ratio + 1.96 * error), 1.0)
    drawn = rng.multinomial(count, np.full(count, 1.0 / count), size=rounds)
    low, high = np.quantile((drawn @ good) / np.maximum(drawn @ whole, 1e-30), [0.025, 0.975])
    return float(low), float(high)
