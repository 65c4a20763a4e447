"""Waits, experiments and idle capacity on days one can reckon by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fleet_rows import attempt, attempts

from keepstep.fleet.ettr_measured import ettr_cells, run_times, waits
from keepstep.fleet.queueing import experiments, idle_capacity, partial_nodes, queue_waits

HOUR = 3_600_000_000


def test_waits_by_size_leave_out_what_is_unknown():
    wait = np.array([0, HOUR, 2 * HOUR, -1, 4 * HOUR])
    small, large = queue_waits(np.array([0, 0, 0, 0, 1]), wait, names=("1-8", "9-16"))
    assert (small.runs, small.mean, small.median, small.over_an_hour) == (3, 1.0, 1.0, pytest.approx(1 / 3))
    assert (large.size, large.p99) == ("9-16", 4.0)


def test_completed_experiments_and_time_to_first_result():
    (row,) = experiments(
        np.zeros(4, int),
        np.array([True, True, True, False]),
        hours=np.array([1.0, 2.0, 3.0, 10.0]),
        gpu_hours=np.full(4, 250.0),
        names=("1-8",),
        days=3.0,
    )
    assert (row.completed, row.per_day, row.per_1000_gpu_hours, row.median_hours_to_result) == (3, 1.0, 3.0, 2.0)


def test_idle_capacity_that_a_waiting_job_could_have_used():
    """16 GPUs; 8 are used for 10 h; from hour 2 to 10 a job of 8 waits although 8 are idle, then it runs 10 h."""
    found = idle_capacity(
        np.array([0, 10 * HOUR]),
        np.array([10 * HOUR, 20 * HOUR]),
        gpus=np.array([8, 8]),
        waiting_since=np.array([0, 2 * HOUR]),
        capacity=16,
    )
    assert (found.capacity_gpus, found.capacity_from) == (16, "registered")
    assert (found.allocated, found.idle) == (0.5, 0.5)
    assert found.fragmented == pytest.approx(0.2, abs=1e-3)
    assert found.mean_waiting_jobs == pytest.approx(0.4, abs=1e-3)


def test_a_job_too_large_for_what_is_idle_is_no_fragmentation():
    found = idle_capacity(
        np.array([0, 10 * HOUR]),
        np.array([10 * HOUR, 20 * HOUR]),
        gpus=np.array([8, 16]),
        waiting_since=np.array([0, 2 * HOUR]),
        capacity=None,
    )
    assert (found.capacity_gpus, found.fragmented) == (16, 0.0)
    assert found.capacity_from == "the most that was allocated at once"


def test_nothing_observed():
    empty = np.empty(0, np.int64)
    assert idle_capacity(empty, empty, gpus=empty, waiting_since=empty, capacity=None).moments == 0
    assert partial_nodes(empty, empty, end=empty, gpus=empty) == (0.0, 0.0)


def test_nodes_partly_used():
    free, used = partial_nodes(
        np.array([1, 1, 2]),
        np.array([0, HOUR, 0]),
        end=np.array([2 * HOUR, 3 * HOUR, HOUR]),
        gpus=np.array([4.0, 4.0, 2.0]),
    )
    assert (free, used) == (4.0 * 2 + 6.0, 4.0 * 2 + 2.0)


def test_a_requeued_life_waited_since_the_one_before():
    columns = attempts(
        attempt(1, 100, 200, run_id=1, life=0, submit=0, eligible=40, job_number=7),
        attempt(2, 330, 400, run_id=1, life=1, submit=201, eligible=320, job_number=7),
        attempt(3, 900, 950, run_id=1, life=2, submit=800, eligible=None, job_number=8),
        attempt(4, 10, 20, run_id=2, submit=None, eligible=None),
    )
    assert (waits(columns)[:3] // 10**6).tolist() == [60, 130, 100]
    assert waits(columns)[3] == -1


def test_ratio_of_sums_and_mean_of_ratios():
    columns = attempts(
        attempt(1, 3600, 2 * 3600, run_id=1, submit=0, eligible=0),
        attempt(2, 0, 3600, run_id=2, gpus=80, node_count=10),
    )
    times = run_times(columns, np.array([HOUR, HOUR // 2]))
    (cell,) = ettr_cells(times, np.zeros(2, int), names=("all",), rng=np.random.default_rng(0))
    assert cell.mean_of_ratios == 0.5
    assert cell.of_sums == pytest.approx((8 + 40) / (16 + 80))
    assert cell.wait_share == pytest.approx(8 / 96)
    assert cell.gpu_hours == 88.0


def test_many_runs_use_the_same_ratio():
    rng = np.random.default_rng(1)
    rows = [attempt(number, 0, 3600 + number) for number in range(2500)]
    columns = attempts(*rows)
    kept = (columns.length * rng.uniform(0.8, 1.0, 2500)).astype(np.int64)
    (cell,) = ettr_cells(run_times(columns, kept), np.zeros(2500, int), names=("",), rng=rng)
    assert cell.group == "(none)"
    assert cell.low < 0.9 < cell.high
    assert cell.high - cell.low < 0.01
