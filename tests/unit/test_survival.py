"""Kaplan-Meier and the censored Weibull fit: textbook data, planted truth, the public trace."""

from __future__ import annotations

import numpy as np
import pytest
from fault_list import LAST_DAY, NODES, faults
from hypothesis import given
from hypothesis import strategies as some

from keepstep.fleet.episodes import start_gaps
from keepstep.fleet.survival import kaplan_meier, survival_at, weibull_fit


def test_gaps_of_the_trace():
    gaps = start_gaps(faults(), horizon=LAST_DAY)
    assert int(gaps.observed.sum()) == 353
    curve = kaplan_meier(gaps.days, gaps.observed)
    assert [survival_at(curve, day) for day in (7, 28, 90, 180)] == pytest.approx(
        [0.737, 0.588, 0.463, 0.355], abs=6e-4
    )
    assert weibull_fit(gaps.days, gaps.observed).shape == pytest.approx(0.404, abs=6e-4)


def test_gaps_of_the_trace_with_day_0_as_origin():
    gaps = start_gaps(faults(), horizon=LAST_DAY, origin_nodes=NODES)
    assert len(gaps.days) == 984
    curve = kaplan_meier(gaps.days, gaps.observed)
    assert [survival_at(curve, day) for day in (7, 28, 90, 180)] == pytest.approx(
        [0.841, 0.747, 0.600, 0.453], abs=6e-4
    )
    assert weibull_fit(gaps.days, gaps.observed).shape == pytest.approx(0.49, abs=6e-3)


def test_a_textbook_curve():
    """Remission of leukaemia under 6-MP (Freireich 1963): S(10) = 0.753, S(22) = 0.538."""
    weeks = [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35]
    failed = [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    curve = kaplan_meier(weeks, failed)
    assert (survival_at(curve, 10), survival_at(curve, 22)) == pytest.approx((0.753, 0.538), abs=6e-4)
    assert survival_at(curve, 5) == 1.0
    assert np.isnan(survival_at(curve, 36))
    assert all(curve.low <= curve.survival)
    assert all(curve.survival <= curve.high)


def test_the_planted_weibull_is_found_under_censoring():
    rng = np.random.default_rng(2)
    life, seen = 100 * rng.weibull(0.6, 20000), rng.uniform(0, 150, 20000)
    fit = weibull_fit(np.minimum(life, seen), life <= seen)
    assert (fit.shape, fit.scale) == pytest.approx((0.6, 100), rel=0.03)


def test_nothing_to_fit():
    assert weibull_fit([1.0, 2.0], [False, False]) is None
    assert weibull_fit([3.0, 3.0], [True, True]) is None
    assert kaplan_meier([], []).subjects == 0


@given(some.lists(some.tuples(some.integers(0, 50), some.booleans()), min_size=1, max_size=60))
def test_the_curve_only_falls(lives):
    curve = kaplan_meier([float(time) for time, _ in lives], [failed for _, failed in lives])
    assert np.all(np.diff(np.append(1.0, curve.survival)) <= 0)
    assert np.all((curve.survival >= 0) & (curve.low >= 0) & (curve.high <= 1))
