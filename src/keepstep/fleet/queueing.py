"""Whether helping one job hides loss elsewhere: waits, completed experiments, first results, idle capacity. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.survival import kaplan_meier

__all__ = ["Experiments", "Idle", "QueueWait", "experiments", "idle_capacity", "partial_nodes", "queue_waits"]

_HOUR_US = 3.6e9


class QueueWait(msgspec.Struct, frozen=True):
    """Wait before the first start of runs of one size, in hours."""

    size: str
    runs: int
    mean: float
    median: float
    p90: float
    p99: float
    over_an_hour: float


def queue_waits(size: Any, wait_us: Any, *, names: tuple[str, ...]) -> tuple[QueueWait, ...]:
    """By class of size (index of `names`); negative waits are unknown and left out."""
    known = wait_us >= 0
    size, hours = size[known], wait_us[known] / _HOUR_US
    if not len(size):
        return ()
    order = np.argsort(size, kind="stable")
    numbers, firsts = np.unique(size[order], return_index=True)
    rows = []
    for number, part in zip(numbers, np.split(hours[order], firsts[1:]), strict=True):
        median, p90, p99 = (float(value) for value in np.quantile(part, [0.5, 0.9, 0.99]))
        over = float((part > 1.0).mean())
        rows.append(QueueWait(names[int(number)], len(part), float(part.mean()), median, p90, p99, over))
    return tuple(rows)


class Experiments(msgspec.Struct, frozen=True):
    """Runs of one size: how many began and completed, per day and per 1000 GPU-hours, and the time to first result.

    First result is the end of the first completed attempt, counted from the first submission (hours): the median by
    Kaplan-Meier, runs without a result being censored; not a number where under half have one.
    """

    size: str
    runs: int
    completed: int
    completed_share: float
    per_day: float
    per_1000_gpu_hours: float
    median_hours_to_result: float


def experiments(
    size: Any, completed: Any, *, hours: Any, gpu_hours: Any, names: tuple[str, ...], days: float
) -> tuple[Experiments, ...]:
    """`hours` from submission to the first result, or to the last moment the run was seen."""
    rows = []
    for number in np.unique(size):
        here = size == number
        done, spent = int(completed[here].sum()), float(gpu_hours[here].sum())
        curve = kaplan_meier(hours[here], completed[here])
        below = np.flatnonzero(curve.survival <= 0.5)
        median = float(curve.times[below[0]]) if len(below) else float("nan")
        rows.append(
            Experiments(
                names[int(number)],
                int(here.sum()),
                done,
                done / int(here.sum()),
                done / days if days else float("nan"),
                1000.0 * done / spent if spent else float("nan"),
                median,
            )
        )
    return tuple(rows)


class Idle(msgspec.Struct, frozen=True):
    """Shares of the capacity over time. `fragmented` is idle although a waiting job asked for no more than was idle.

    `capacity_from` says where the capacity comes from: registered, or the most that was ever allocated.
    """

    capacity_gpus: int
    capacity_from: str
    moments: int
    allocated: float
    idle: float
    fragmented: float
    mean_waiting_jobs: float
    mean_waiting_gpus: float


def idle_capacity(
    start: Any, end: Any, *, gpus: Any, waiting_since: Any, capacity: int | None, moments: int = 4096
) -> Idle:
    """Looked at in the middle of `moments` equal parts of the observed time.

    At each moment the idle GPUs that waiting jobs could fill, smallest first, are what fragmentation (or policy)
    keeps from them. `waiting_since` equals `start` for jobs that did not wait.
    """
    if not len(start):
        return Idle(capacity or 0, "nothing was observed", 0, *([float("nan")] * 5))
    grid = _grid(start, end, moments=moments)
    used = _standing(start, end, grid=grid, weight=gpus)
    sizes = np.unique(gpus)
    if len(sizes) > 64:
        sizes = np.unique(2 ** np.ceil(np.log2(sizes))).astype(np.int64)
    rank = np.searchsorted(sizes, gpus)
    waiting = np.stack(
        [
            _standing(waiting_since[rank == at], start[rank == at], grid=grid, weight=np.ones(int((rank == at).sum())))
            for at in range(len(sizes))
        ]
    )
    whole = max(capacity or 0, int(used.max()))
    said = "registered" if capacity and capacity >= used.max() else "the most that was allocated at once"
    free = whole - used
    room, stuck = free.copy(), np.zeros(len(grid))
    for at, asked in enumerate(sizes):
        fits = np.minimum(waiting[at], room // asked) * asked
        stuck, room = stuck + fits, room - fits
    return Idle(
        capacity_gpus=whole,
        capacity_from=said,
        moments=len(grid),
        allocated=_share(used, whole),
        idle=_share(free, whole),
        fragmented=_share(stuck, whole),
        mean_waiting_jobs=float(waiting.sum(axis=0).mean()),
        mean_waiting_gpus=float((waiting * sizes[:, None]).sum(axis=0).mean()),
    )


def _share(gpus: Any, whole: int) -> float:
    return float(gpus.mean() / whole) if whole else float("nan")


def _grid(start: Any, end: Any, *, moments: int) -> Any:
    low, high = int(start.min()), int(end.max())
    return low + ((np.arange(moments) + 0.5) * ((high - low) / moments)).astype(np.int64)


def _standing(begin: Any, end: Any, *, grid: Any, weight: Any) -> Any:
    """Sum of weights of the intervals that hold at each moment of the grid."""
    begin = np.minimum(begin, end)
    changes = np.bincount(np.searchsorted(grid, begin), weights=weight, minlength=len(grid) + 1)
    changes -= np.bincount(np.searchsorted(grid, end), weights=weight, minlength=len(grid) + 1)
    return np.round(np.cumsum(changes)[: len(grid)])


def partial_nodes(node: Any, start: Any, *, end: Any, gpus: Any, per_node: float = 8.0) -> tuple[float, float]:
    """(GPU-hours free on nodes that were partly used, GPU-hours used there), from jobs that share nodes.

    Node numbers, times in us and GPUs of each attempt on each node; `per_node` GPUs on a node.
    """
    if not len(node):
        return 0.0, 0.0
    nodes, times = np.concatenate([node, node]), np.concatenate([start, end])
    change = np.concatenate([gpus, -gpus]).astype(float)
    order = np.lexsort((times, nodes))
    nodes, times, level = nodes[order], times[order], np.cumsum(change[order])
    width = np.where(np.append(nodes[1:] == nodes[:-1], False), np.append(times[1:], 0) - times, 0) / _HOUR_US
    used = np.clip(level, 0.0, per_node)
    partly = (used > 1e-6) & (used < per_node - 1e-6)
    return float((width * (per_node - used))[partly].sum()), float((width * used)[partly].sum())
