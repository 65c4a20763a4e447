"""Sections of the report about what failures cost: second order, waiting to start again, where to invest."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.fleet.attempt_arrays import UNKNOWN
from keepstep.fleet.investment import Costs, investments
from keepstep.fleet.second_order import Losers, cascades, requeue_times, second_order
from keepstep.fleet.sizes import SIZES, size_class
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, sheet

__all__ = ["investment_section", "second_order_section"]


def _losers(data: FleetData) -> Losers:
    seen = data.account.attempts
    preempted = seen.ended("preempted") | (seen.victim_of != UNKNOWN)
    return Losers(
        seen.attempt,
        seen.run,
        seen.gpus,
        data.account.lost,
        seen.infrastructure,
        preempted,
        seen.victim_of,
        seen.preempted_by,
    )


def second_order_section(data: FleetData) -> Section:
    """First and second order, cascades by level, and how long failed runs waited for their next life."""
    found = second_order(_losers(data), rng=data.rng(5))
    aged = int((data.account.age >= 0).sum())
    words = (
        f"work lost with failed jobs {found.first_gpu_hours:,.1f} GPU-hours; with jobs preempted for their restart "
        f"{found.second_gpu_hours:,.1f}: {found.share:.2%} [{found.low:.2%}, {found.high:.2%}] of both",
        f"{found.victims:,} preemptions go back to {found.instigators:,} of {found.failures:,} failures, at most "
        f"{found.most_victims:,} to one; by level of the cascade: {', '.join(map(str, found.levels)) or 'none'}; "
        f"{found.unexplained:,} preemptions no failure explains",
        f"lost work is min(run time, half the checkpoint interval), the true age of the checkpoint for {aged:,} "
        f"attempts; published for comparison: 16 % at hourly checkpoints (Meta, HPCA 2025)",
    )
    shown = (
        ("size", "{size}"),
        ("restarts", "{restarts:,}"),
        ("median min", "{median_minutes:.1f}"),
        ("p90 min", "{p90_minutes:.1f}"),
        ("GPU-hours not trained", "{gpu_hours}"),
    )
    rows = _requeues(data)
    return Section(
        "second_order",
        "Second order: what failures cost others",
        words,
        (
            sheet("second_order", "Sums", rows=[found], drawn=True),
            sheet("requeue", "From a failure to the next life of the run", rows=rows, shown=shown),
        ),
    )


def _gaps(data: FleetData) -> tuple[Any, Any]:
    """Attempts that failed by the infrastructure and had a next life, and the time between [us]."""
    seen = data.account.attempts
    follows = np.append(seen.run[1:] == seen.run[:-1], False)
    ended = np.flatnonzero(follows & seen.infrastructure) if len(seen.run) else np.empty(0, np.int64)
    return ended, np.maximum(seen.start[ended + 1] - seen.end[ended], 0) if len(ended) else np.empty(0, np.int64)


def _requeues(data: FleetData) -> Any:
    ended, gap = _gaps(data)
    gpus = data.account.attempts.gpus[ended]
    return requeue_times(size_class(gpus), gap, gpus=gpus, names=SIZES)


def investment_section(data: FleetData) -> Section:
    """Causes ranked by frequency x GPUs x (detect + repair + recompute + second order)."""
    seen = data.account.attempts
    failed = np.flatnonzero(seen.failed | seen.infrastructure)
    ended, gap = _gaps(data)
    repair = np.zeros(len(seen.run), np.int64)
    repair[ended] = gap + np.minimum(seen.length[ended + 1], data.options.assumptions.startup)
    detect, known = _detection(data)
    second = np.zeros(len(seen.run))
    root, level = cascades(_losers(data))
    victims = np.flatnonzero(level > 0)
    if len(victims):
        order = np.argsort(seen.attempt, kind="stable")
        place = order[np.minimum(np.searchsorted(seen.attempt, root[victims], sorter=order), len(order) - 1)]
        exact = seen.attempt[place] == root[victims]
        np.add.at(second, place[exact], (data.account.lost * seen.gpus)[victims][exact])
    costs = Costs(
        cause=seen.cause[0][failed],
        owner=seen.owner[0][failed],
        gpus=seen.gpus[failed],
        event=seen.independent[failed],
        detect=detect[failed],
        repair=repair[failed],
        recompute=data.account.lost[failed],
        second=second[failed],
    )
    rows = investments(costs, causes=seen.cause[1], owners=seen.owner[1])
    shown = (
        ("cause", "{cause}"),
        ("owner", "{owner}"),
        ("events", "{events:,}"),
        ("failures", "{failures:,}"),
        ("GPUs", "{mean_gpus:,.0f}"),
        ("detect", "{detect}"),
        ("repair", "{repair}"),
        ("recompute", "{recompute}"),
        ("2nd order", "{second_order}"),
        ("GPU-hours [95 %]", "{gpu_hours} [{low}, {high}]"),
        ("share", "{share:.1%}"),
    )
    words = (
        "cost = frequency x GPUs x (detect + repair + recompute + second order); repair is the wait for the next life "
        "and its start-up, whether or not the GPUs idled meanwhile",
        f"detection is known for {known:,} failures from their incidents and 0 for the others",
    )
    return Section(
        "investment", "Where an investment pays most", words, (sheet("investment", "By cause", rows=rows, shown=shown),)
    )


def _detection(data: FleetData) -> tuple[Any, int]:
    """From onset to decision of the incidents inside each attempt [us], and how many attempts have any."""
    seen = data.account.attempts
    found = np.zeros(len(seen.run), np.int64)
    if not data.store.rows("incidents") or not len(seen.run):
        return found, 0
    rows = data.rows(_DETECTION)
    order = np.argsort(seen.attempt, kind="stable")
    ids = rows["attempt_id"].to_numpy()
    place = order[np.minimum(np.searchsorted(seen.attempt, ids, sorter=order), len(order) - 1)]
    here = seen.attempt[place] == ids
    found[place[here]] = rows["spent"].to_numpy()[here]
    return found, int((found > 0).sum())


_DETECTION = """
SELECT a.attempt_id, sum(coalesce(i.decided_us, i.detected_us, 0))::BIGINT AS spent
FROM incidents i JOIN attempts a
  ON a.job_id = coalesce(nullif(i.scheduler_job, ''), i.job) AND (i.cluster = '' OR i.cluster = a.cluster)
 AND i.onset >= a.start AND i.onset <= coalesce(a."end", a.last_seen)
GROUP BY a.attempt_id
"""
