"""Preemptions caused by failures: cascades, shares, the crash loop, and waiting for the next life."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.fleet.attempt_arrays import UNKNOWN
from keepstep.fleet.second_order import Losers, cascades, requeue_times, second_order

HALF_HOUR = 1800 * 10**6


def losers(*rows):
    """(attempt, run, gpus, lost us, event, preempted, victim_of, preempted_by), None for unknown ids."""
    columns = [np.array([UNKNOWN if row[at] is None else row[at] for row in rows]) for at in range(8)]
    columns[4], columns[5] = columns[4].astype(bool), columns[5].astype(bool)
    return Losers(*columns)


CRASH_LOOP = [(1 + life, 1, 1024, HALF_HOUR, True, False, None, None) for life in range(36)] + [
    (1000 + victim, 1000 + victim, 8, HALF_HOUR, False, True, 1 + victim % 35, 2 + victim % 35) for victim in range(548)
]


def test_the_crash_loop_of_35_requeues_and_548_preemptions():
    found = second_order(losers(*CRASH_LOOP), rng=np.random.default_rng(0))
    assert (found.failures, found.instigators, found.victims, found.most_victims) == (36, 35, 548, 16)
    assert found.first_gpu_hours == pytest.approx(36 * 512)
    assert found.second_gpu_hours == pytest.approx(548 * 4)
    assert found.share == pytest.approx(548 * 4 / (548 * 4 + 36 * 512))
    assert found.low < found.share < found.high
    assert found.levels == (548,)


def test_a_victim_whose_restart_preempts_another_is_a_level_below():
    rows = losers(
        (1, 1, 64, HALF_HOUR, True, False, None, None),
        (2, 1, 64, 0, False, False, None, None),
        (3, 2, 32, HALF_HOUR, False, True, 1, 2),
        (4, 2, 32, 0, False, False, None, None),
        (5, 3, 16, HALF_HOUR, False, True, None, 4),
        (6, 4, 8, HALF_HOUR, False, True, None, 99),
        (7, 5, 8, HALF_HOUR, False, True, None, None),
    )
    root, level = cascades(rows)
    assert level.tolist() == [0, 0, 1, 0, 2, 0, 0]
    assert root[[2, 4]].tolist() == [1, 1]
    found = second_order(rows, rng=np.random.default_rng(0))
    assert (found.levels, found.unexplained, found.instigators, found.most_victims) == ((1, 1), 2, 1, 2)
    assert (found.first_gpu_hours, found.second_gpu_hours, found.deeper_gpu_hours) == (32.0, 24.0, 8.0)


def test_preemptions_that_go_round_end():
    rows = losers((1, 1, 8, 1, False, True, None, 2), (2, 2, 8, 1, False, True, None, 1))
    assert cascades(rows)[1].tolist() == [0, 0]


def test_nothing_happened():
    empty = Losers(*(np.empty(0, np.int64) for _ in range(4)), *(np.empty(0, bool),) * 2, *(np.empty(0, np.int64),) * 2)
    assert second_order(empty, rng=np.random.default_rng(0)).share == 0.0


def test_waits_for_the_next_life():
    (row,) = requeue_times(np.zeros(3, int), np.array([60, 120, 600]) * 10**6, gpus=np.full(3, 8), names=("1-8",))
    assert (row.restarts, row.median_minutes, row.p90_minutes) == (3, 2.0, pytest.approx(8.4))
    assert row.gpu_hours == pytest.approx(780 / 3600 * 8)
