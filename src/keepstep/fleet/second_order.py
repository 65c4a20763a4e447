"""Losses of jobs that did not fail: those preempted so that a failed one could start again. Pure.

The first order of a failure is the work it lost; the second order is what the jobs lost that made room for its restart
(Meta, HPCA 2025, section 4.4). A job preempted by the restart of such a victim is the next level of the cascade.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.attempt_arrays import UNKNOWN
from keepstep.fleet.rates import bootstrap_rate

__all__ = ["Losers", "Requeue", "SecondOrder", "cascades", "requeue_times", "second_order"]

_GPU_HOUR = 3.6e9


class Losers(msgspec.Struct, frozen=True):
    """Arrays over attempts sorted by run and life: ids (`UNKNOWN`: none), GPUs, work lost with the attempt [us].

    `event` marks failures of the infrastructure, `preempted` those the scheduler ended, `victim_of` the failed attempt
    whose restart was the reason, `preempted_by` who took the place.
    """

    attempt: Any
    run: Any
    gpus: Any
    lost: Any
    event: Any
    preempted: Any
    victim_of: Any
    preempted_by: Any


class SecondOrder(msgspec.Struct, frozen=True):
    """Sums over the fleet in GPU-hours. `share` is second / (first + second) with a bootstrap over failures.

    `deeper_gpu_hours` (levels below the victims themselves) is part of `second_gpu_hours`. `levels` counts preemptions
    by level, `unexplained` preemptions that no failure explains.
    """

    failures: int
    instigators: int
    victims: int
    most_victims: int
    first_gpu_hours: float
    second_gpu_hours: float
    deeper_gpu_hours: float
    share: float
    low: float
    high: float
    levels: tuple[int, ...]
    unexplained: int


def cascades(losers: Losers, *, deepest: int = 16) -> tuple[Any, Any]:
    """For each attempt the failure at the root of its preemption (`UNKNOWN`: none) and the level (0: none, 1: victim).

    A preemption has the root of the life that preceded the preempting attempt in its own run, if that was preempted.
    """
    count = len(losers.attempt)
    root = np.where(losers.preempted, losers.victim_of, UNKNOWN)
    level = (root != UNKNOWN).astype(np.int64)
    if not count:
        return root, level
    order = np.argsort(losers.attempt, kind="stable")
    place = np.minimum(np.searchsorted(losers.attempt, losers.preempted_by, sorter=order), count - 1)
    by = order[place]
    found = (losers.preempted_by != UNKNOWN) & (losers.attempt[by] == losers.preempted_by) & (by > 0)
    before = np.where(found, by - 1, 0)
    found &= losers.run[before] == losers.run[by]
    for depth in range(2, deepest + 1):
        grows = losers.preempted & found & (root == UNKNOWN) & (level[before] == depth - 1)
        if not grows.any():
            break
        root, level = np.where(grows, root[before], root), np.where(grows, depth, level)
    return root, level


def second_order(losers: Losers, *, rng: np.random.Generator) -> SecondOrder:
    """Add up both orders and count the cascades."""
    root, level = cascades(losers)
    gpu_hours = losers.lost / _GPU_HOUR * losers.gpus
    first, second = _by_failure(losers, root, gpu_hours=gpu_hours)
    low, high = bootstrap_rate(second, first + second, rng=rng)
    victims = level == 1
    most = np.unique(root[level > 0], return_counts=True)[1]
    total = float(first.sum() + second.sum())
    return SecondOrder(
        failures=int(losers.event.sum()),
        instigators=len(np.unique(root[victims])),
        victims=int((level > 0).sum()),
        most_victims=int(most.max()) if len(most) else 0,
        first_gpu_hours=float(first.sum()),
        second_gpu_hours=float(second.sum()),
        deeper_gpu_hours=float(gpu_hours[level > 1].sum()),
        share=float(second.sum()) / total if total else 0.0,
        low=low,
        high=min(high, 1.0),
        levels=tuple(np.bincount(level)[1:].tolist()),
        unexplained=int((losers.preempted & (level == 0)).sum()),
    )


def _by_failure(losers: Losers, root: Any, *, gpu_hours: Any) -> tuple[Any, Any]:
    """First- and second-order GPU-hours of each failure, user's failures with victims included at the end."""
    failures = np.unique(np.concatenate([losers.attempt[losers.event], root[root != UNKNOWN]]))
    first = np.zeros(len(failures))
    first[np.searchsorted(failures, losers.attempt[losers.event])] = gpu_hours[losers.event]
    second = np.zeros(len(failures))
    has = root != UNKNOWN
    np.add.at(second, np.searchsorted(failures, root[has]), gpu_hours[has])
    return first, second


class Requeue(msgspec.Struct, frozen=True):
    """How long runs of a size waited from a failure to their next life: minutes, and the GPU-hours not trained."""

    size: str
    restarts: int
    median_minutes: float
    p90_minutes: float
    gpu_hours: float


def requeue_times(size: Any, gap_us: Any, *, gpus: Any, names: tuple[str, ...]) -> tuple[Requeue, ...]:
    """`gap_us` is the time from a failed life's end to the next life's start; `size` its class, an index of `names`."""
    found = []
    for number in np.unique(size):
        gaps = gap_us[size == number]
        minutes = np.quantile(gaps / 6e7, [0.5, 0.9])
        hours = float((gaps / _GPU_HOUR * gpus[size == number]).sum())
        found.append(Requeue(names[int(number)], len(gaps), float(minutes[0]), float(minutes[1]), hours))
    return tuple(found)
