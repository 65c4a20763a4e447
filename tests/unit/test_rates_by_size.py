"""Rates by size, projections and changes: planted rates are found, censoring is no failure, edges are exact."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keepstep.fleet.rates_by_size import (
    Lives,
    fleet_rate,
    lives_between,
    projections,
    rates_by_size,
    reference_rate,
    size_curves,
)
from keepstep.fleet.rates_change import CANNOT_TELL, rate_ratio, rates_between
from keepstep.fleet.sizes import DURATIONS, SIZES, duration_class, size_class, size_top

DAY = 86_400_000_000


def planted(rng, count=40_000, per_1000=6.5):
    """Jobs of 8 to 4096 GPUs that would run a day and fail at a rate per node-day."""
    nodes = 2 ** rng.integers(0, 10, count)
    life = rng.exponential(1000 / per_1000 / nodes) * DAY
    length = np.minimum(life, DAY).astype(np.int64)
    return Lives(np.arange(count), nodes * 8, nodes, length, life < DAY)


def test_planted_rates_are_inside_their_intervals():
    lives = planted(np.random.default_rng(1))
    rows = rates_by_size(lives, rng=np.random.default_rng(2))
    assert [row.size for row in rows] == list(SIZES[:10])
    inside = sum(row.low <= 6.5 <= row.high for row in rows)
    assert inside >= 8
    assert sum(row.bootstrap_low <= 6.5 <= row.bootstrap_high for row in rows) >= 8
    last = rows[-1]
    assert last.mttf_hours == pytest.approx(24 / (512 * 6.5e-3), rel=0.03)
    assert last.modelled_hours == pytest.approx(last.mttf_hours, rel=0.05)
    assert last.shape == pytest.approx(1.0, abs=0.05)
    assert last.alive_24h == pytest.approx(math.exp(-512 * 6.5e-3), abs=0.02)
    assert fleet_rate(lives).low < 6.5 < fleet_rate(lives).high


def test_exactly_128_gpus_are_outside_the_rate_of_large_jobs():
    lives = Lives(np.arange(2), np.array([128, 136]), np.array([16, 17]), np.array([DAY, DAY]), np.array([True, False]))
    assert (fleet_rate(lives).events, fleet_rate(lives).exposure) == (0, 0.017)


def test_a_size_without_events_has_an_upper_limit_and_no_mttf():
    lives = Lives(np.arange(3), np.full(3, 8), np.ones(3, int), np.full(3, DAY), np.zeros(3, bool))
    (row,) = rates_by_size(lives, rng=np.random.default_rng(0))
    assert (row.rate, row.low, row.mttf_hours) == (0.0, 0.0, math.inf)
    assert row.mttf_low == pytest.approx(72 / 3.6889, rel=1e-4)
    assert row.shape is None
    assert projections(lives) == ()
    assert size_curves(lives) == ()


def test_projections_begin_where_events_end():
    lives = planted(np.random.default_rng(3))
    found = projections(lives)
    assert [row.gpus for row in found] == [8192, 16384, 32768, 65536, 131072]
    assert found[1].mttf_low < 1.8029 < found[1].mttf_high
    wide = projections(lives, widen=2.0)
    assert wide[0].mttf_high > found[0].mttf_high


def test_without_large_jobs_the_rate_of_all_sizes_is_the_model():
    lives = planted(np.random.default_rng(3))
    small = lives.chosen(lives.gpus <= 128)
    rate, which = reference_rate(small)
    assert rate.events == int(small.event.sum()) > 0
    assert "all sizes" in which
    assert projections(small)[0].gpus == 256
    assert "r_f" in reference_rate(lives)[1]


def test_curves_end_at_what_was_seen():
    curves = dict(size_curves(planted(np.random.default_rng(3))))
    assert curves["2049-4096"].last_time == pytest.approx(24.0)


@pytest.mark.parametrize(("gpus", "name"), [(1, "1-8"), (8, "1-8"), (9, "9-16"), (128, "65-128"), (129, "129-256")])
def test_sizes(gpus, name):
    assert SIZES[int(size_class([gpus])[0])] == name


def test_the_largest_sizes_and_lengths():
    assert SIZES[int(size_class([10**9])[0])] == ">1048576"
    assert (size_top(0), size_top(1), size_top(18)) == (8, 16, 2097152)
    assert [DURATIONS[int(index)] for index in duration_class([0, DAY // 24, DAY, 7 * DAY])] == [
        "<1 h",
        "1-4 h",
        "1-7 d",
        ">=7 d",
    ]


def test_a_changed_rate_is_seen_and_an_unchanged_one_is_not():
    (change,) = rates_between(["1 May"], [(50, 100.0), (100, 100.0)])
    assert (change.ratio, change.verdict) == (2.0, "higher after")
    (change,) = rates_between(["1 May"], [(50, 100.0), (55, 100.0)])
    assert change.verdict == CANNOT_TELL
    assert rates_between(["a"], [(0, 10.0), (0, 10.0)])[0].verdict == CANNOT_TELL


def test_the_exact_ratio_of_two_rates():
    """R: poisson.test(c(11, 6+8+7), c(800, 1083+1050+878)) gives 1.971488 [0.858426, 4.277266], p = 0.07967."""
    ratio, low, high, p_value = rate_ratio((21, 3011.0), (11, 800.0))
    assert (ratio, p_value) == pytest.approx((1.971488, 0.07967), rel=1e-4)
    assert (low, high) == pytest.approx((0.858426, 4.277266), rel=1e-4)


def test_the_rate_is_0_after_if_nothing_happened_there():
    ratio, low, high, _ = rate_ratio((12, 10.0), (0, 10.0))
    assert (ratio, low) == (0.0, 0.0)
    assert 0 < high < 1


def test_lives_are_cut_at_the_dates():
    lives = Lives(np.arange(2), np.full(2, 8), np.ones(2, int), np.array([10, 10]), np.array([True, True]))
    part = lives_between(lives, np.array([0, 5]), low=0, high=10)
    assert (part.length.tolist(), part.event.tolist()) == ([10, 5], [True, False])
    rest = lives_between(lives, np.array([0, 5]), low=10, high=99)
    assert (rest.length.tolist(), rest.event.tolist()) == ([5], [True])
