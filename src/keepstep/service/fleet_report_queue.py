"""Section of the report about the queue: waits, completed experiments, first results, capacity left idle."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.fleet.attempt_arrays import UNKNOWN
from keepstep.fleet.ettr_measured import waits
from keepstep.fleet.queueing import experiments, idle_capacity, partial_nodes, queue_waits
from keepstep.fleet.sizes import SIZES
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, sheet

__all__ = ["queue_section"]

_DAY_US = 86_400_000_000


def queue_section(data: FleetData) -> Section:
    """Waits by size, experiments by size, idle and fragmented capacity."""
    seen, times = data.account.attempts, data.times
    wait = waits(seen)
    first = wait[times.first]
    idle = idle_capacity(
        seen.start, seen.end, gpus=seen.gpus, waiting_since=seen.start - np.maximum(wait, 0), capacity=_capacity(data)
    )
    free, used = _partial(data)
    words = (
        f"{int((first < 0).sum()):,} of {len(first):,} runs have no known wait; a later life of the same job counts "
        f"from the end of the one before, because Slurm writes its submission anew",
        f"capacity {idle.capacity_gpus:,} GPUs ({idle.capacity_from}): {idle.allocated:.1%} allocated, {idle.idle:.1%} "
        f"idle, {idle.fragmented:.2%} idle while a waiting job asked for no more than was idle (looked at in "
        f"{idle.moments:,} moments; jobs that never started are not in it)"
        if idle.moments
        else "nothing is known of the use of the capacity",
        f"on nodes shared by small jobs {free:,.0f} GPU-hours stood free beside {used:,.0f} in use",
    )
    shown = (
        ("size", "{size}"),
        ("runs", "{runs:,}"),
        ("mean h", "{mean:.3f}"),
        ("median h", "{median:.3f}"),
        ("p90 h", "{p90:.3f}"),
        ("p99 h", "{p99:.3f}"),
        ("over 1 h", "{over_an_hour:.1%}"),
    )
    sheets = (
        sheet(
            "queue_wait", "Wait before the first start", rows=queue_waits(data.sizes, first, names=SIZES), shown=shown
        ),
        _experiments(data),
        sheet("idle", "Capacity", rows=[idle], drawn=True),
    )
    return Section("queue", "Queue, experiments and idle capacity", words, sheets)


def _experiments(data: FleetData) -> Any:
    """A run's first result is the end of its first completed life."""
    seen, times = data.account.attempts, data.times
    done = seen.ended("completed")
    never = np.iinfo(np.int64).max
    ends = np.where(done, seen.end, never)
    result = np.minimum.reduceat(ends, times.first) if len(times.first) else np.empty(0, np.int64)
    completed = result < never
    begin = np.where(times.submit == UNKNOWN, times.start, times.submit)
    hours = np.maximum(np.where(completed, result, times.end) - begin, 0) / 3.6e9
    days = (data.last - data.first) / _DAY_US
    rows = experiments(data.sizes, completed, hours=hours, gpu_hours=times.gpu_allocated, names=SIZES, days=days)
    shown = (
        ("size", "{size}"),
        ("runs", "{runs:,}"),
        ("completed", "{completed:,}"),
        ("share", "{completed_share:.1%}"),
        ("per day", "{per_day:.2f}"),
        ("per 1000 GPU-hours", "{per_1000_gpu_hours:.3f}"),
        ("median h to first result", "{median_hours_to_result}"),
    )
    note = "a result is a completed attempt"
    return sheet("experiments", "Experiments", rows=rows, shown=shown, note=note)


def _capacity(data: FleetData) -> int | None:
    """GPUs registered: of the capacity table, else of the inventory; None where neither says."""
    for text in (
        "SELECT max(total) FROM (SELECT start, sum(gpus) AS total FROM capacity GROUP BY start)",
        "SELECT sum(gpus) FROM inventory",
    ):
        (value,) = data.rows(text).columns[0].to_pylist() or [None]
        if value:
            return int(value)
    return None


_SHARED = """
SELECT dense_rank() OVER (ORDER BY n.node) AS node, epoch_us(a.start) AS s,
       epoch_us(coalesce(a."end", a.last_seen)) AS e, n.gpus AS gpus
FROM attempt_nodes n JOIN attempts a USING (attempt_id)
WHERE n.gpus > 0 AND n.gpus < 8 AND a.start IS NOT NULL AND coalesce(a."end", a.last_seen) >= a.start
"""


def _partial(data: FleetData) -> tuple[float, float]:
    if not data.store.rows("attempt_nodes"):
        return 0.0, 0.0
    rows = data.rows(_SHARED)
    columns = [rows[name].to_numpy() for name in ("node", "s", "e", "gpus")]
    return partial_nodes(columns[0], columns[1], end=columns[2], gpus=columns[3])
