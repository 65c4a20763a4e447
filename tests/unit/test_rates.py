"""Failure rates, MTTF and their intervals against exact and published values."""

from __future__ import annotations

import numpy as np
import pytest
from fault_list import HORIZON, NODES, faults
from hypothesis import given
from hypothesis import strategies as some

from keepstep.fleet.rates import bootstrap_rate, garwood, mttf_hours, rate_of
from keepstep.fleet.rates_nodes import dispersion, halves_correlation, shrink


@pytest.mark.parametrize(
    ("events", "confidence", "low", "high"),
    [
        (0, 0.90, 0.0, 0.0029957),
        (1, 0.90, 5.1293e-5, 0.0047439),
        (5, 0.90, 0.00197015, 0.0105130),
        (0, 0.95, 0.0, 0.0036889),
        (5, 0.95, 0.0016235, 0.0116683),
    ],
)
def test_garwood(events, confidence, low, high):
    assert garwood(events, 1000.0, confidence=confidence) == pytest.approx((low, high), rel=5e-5)


@pytest.mark.parametrize(
    ("gpus", "hours"),
    [(8, 3692.3), (1024, 28.846), (4096, 7.2115), (12288, 2.4038), (16384, 1.8029), (131072, 0.2254)],
)
def test_mttf_of_a_series_system(gpus, hours):
    assert mttf_hours(gpus, 6.50e-3) == pytest.approx(hours, rel=2e-4)


def test_measured_small_and_large_jobs_do_not_share_one_rate():
    """7.9 h at 1,024 GPUs and 47.7 days at 8 imply 23.7 and 21.0 per 1000 node-days, not 6.5."""
    assert pytest.approx(23.7e-3, rel=5e-3) == 1 / (128 * 7.9 / 24)
    assert pytest.approx(21.0e-3, rel=5e-3) == 1 / 47.7


def test_llama_3():
    exposure = 16384 / 8 * 54 / 1000
    assert rate_of(419, exposure).value == pytest.approx(3.789, abs=5e-4)
    assert garwood(419, exposure) == pytest.approx((3.435, 4.169), abs=1e-3)
    assert garwood(419, exposure, confidence=0.9) == pytest.approx((3.489, 4.108), abs=1e-3)
    assert pytest.approx(3.093, abs=5e-4) == 54 * 24 / 419


@pytest.mark.parametrize(
    ("chosen", "count", "value", "low", "high"),
    [
        (lambda row: True, 584, 4.195, 3.914, 4.492),
        (lambda row: row["level"] == "Hardware", 298, 2.141, 1.941, 2.356),
        (lambda row: row["level"] == "Hardware" and row["class"] == "GPU", 158, 1.135, 0.991, 1.295),
    ],
)
def test_rates_of_the_trace(chosen, count, value, low, high):
    rate = rate_of(len(faults(chosen).node), NODES * HORIZON / 1000, confidence=0.9)
    assert rate.events == count
    assert (rate.value, rate.low, rate.high) == pytest.approx((value, low, high), abs=6e-4)


def test_faults_per_node_are_overdispersed():
    counts = np.bincount(faults().node, minlength=NODES)
    assert np.bincount(counts).tolist() == [169, 96, 50, 31, 21, 10, 12, 5, 5, 0, 0, 0, 0, 0, 1]
    found = dispersion(counts)
    assert (found.mean, found.variance, found.vmr) == pytest.approx((1.46, 3.763, 2.577), abs=5e-4)
    assert found.p_value < 1e-6
    assert found.interval_factor == pytest.approx(found.vmr**0.5)


def test_halves_do_not_correlate():
    """Risk is bursty, not a fixed trait."""
    trace = faults()
    early = trace.start < HORIZON / 2
    halves = [np.bincount(trace.node[part], minlength=NODES) for part in (early, ~early)]
    assert abs(halves_correlation(*halves)) < 0.1


def test_poisson_counts_are_not_called_overdispersed():
    counts = np.random.default_rng(7).poisson(2.0, 5000)
    found = dispersion(counts)
    assert found.vmr == pytest.approx(1.0, abs=0.1)
    assert found.interval_factor == 1.0


def test_no_events_cannot_be_tested():
    assert dispersion(np.zeros(10)).p_value == 1.0
    assert dispersion([]).units == 0


def test_shrinkage_finds_the_planted_gamma():
    """Rates drawn from a gamma with shape 2: found again, and nearer to the truth than the raw rates."""
    rng = np.random.default_rng(3)
    exposure = rng.uniform(50, 400, 4000)
    truth = rng.gamma(2.0, 0.005 / 2.0, 4000)
    events = rng.poisson(truth * exposure)
    found = shrink(events, exposure)
    assert found.shape == pytest.approx(2.0, rel=0.15)
    raw = np.abs(events / exposure - truth).mean()
    assert np.abs(found.rates - truth).mean() < 0.8 * raw


def test_even_nodes_all_get_the_rate_of_the_fleet():
    found = shrink(np.full(50, 2), np.full(50, 100.0))
    assert found.rates == pytest.approx(np.full(50, 0.02), rel=1e-3)


@given(some.integers(0, 200), some.floats(1e-3, 1e6), some.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_value_is_inside_its_interval(events, exposure, confidence):
    rate = rate_of(events, exposure, confidence=confidence)
    assert 0 <= rate.low <= rate.value <= rate.high


def test_no_exposure_has_no_rate():
    assert garwood(0, 0.0) == (0.0, float("inf"))
    assert np.isnan(rate_of(0, 0.0).value)


def test_bootstrap_agrees_with_garwood_where_nodes_fail_alike_and_is_wider_where_not():
    rng = np.random.default_rng(11)
    exposure = np.full(2000, 100.0)
    even = rng.poisson(1.0, 2000)
    assert bootstrap_rate(even, exposure, rng=rng) == pytest.approx(garwood(int(even.sum()), 2e5), rel=0.02)
    uneven = even * rng.choice([0, 10], 2000, p=[0.9, 0.1])
    low, high = bootstrap_rate(uneven, exposure, rng=rng)
    exact = garwood(int(uneven.sum()), 2e5)
    assert high - low > 2 * (exact[1] - exact[0])


def test_bootstrap_of_many_units_is_the_bootstrap_of_few():
    rng = np.random.default_rng(5)
    events, exposure = rng.poisson(0.3, 60_000), rng.uniform(1, 5, 60_000)
    low, high = bootstrap_rate(events, exposure, rng=rng, rounds=2000)
    error = np.sqrt(((events - events.sum() / exposure.sum() * exposure) ** 2).sum()) / exposure.sum()
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.08)
