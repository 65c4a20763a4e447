"""Expected ETTR in its three forms against published, exact and simulated values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import optimize

from keepstep.fleet.ettr import Training, daly, exact, failure_free_minutes, finite, published, young

RSC1 = 6.5e-3


def training(gpus, rate=RSC1, **given):
    return Training(failure_free_minutes(gpus, rate), **given)


@pytest.mark.parametrize(
    ("job", "mean", "first_order", "renewal"),
    [
        (training(2048, interval=60), 865.38, 0.9596, 0.9602),
        (training(4096, interval=60), 432.69, 0.9191, 0.9216),
        (training(8000, interval=60), 221.54, 0.8420, 0.8513),
        (training(8000, interval=60, queue=10), 221.54, None, 0.8145),
        (training(8000, interval=30, queue=1), 221.54, 0.9097, 0.9089),
        (training(16000, interval=60), 110.77, 0.6840, 0.7202),
        (training(16000, interval=5), 110.77, 0.9323, 0.9345),
        (training(100000, interval=7), 17.72, 0.5204, 0.6150),
        (training(100000, 2.34e-3, interval=2, startup=2), 49.23, 0.9391, 0.9408),
    ],
)
def test_endless_runs(job, mean, first_order, renewal):
    assert job.mean_minutes == pytest.approx(mean, abs=0.01)
    if first_order is not None:
        assert published(job) == pytest.approx(first_order, abs=6e-5)
    assert exact(job) == pytest.approx(renewal, abs=6e-5)


@pytest.mark.parametrize(
    ("days", "value", "simulated", "error"), [(1, 0.9082, 0.9096, 0.0015), (7, 0.9413, 0.9414, 0.0007)]
)
def test_finite_runs(days, value, simulated, error):
    job = training(1024, interval=60, queue=60)
    assert job.mean_minutes == pytest.approx(1730.8, abs=0.05)
    assert finite(job, days * 1440) == pytest.approx(value, abs=6e-5)
    assert finite(job, days * 1440) == pytest.approx(simulated, abs=error)


@pytest.mark.parametrize(
    ("rate", "write", "mean", "youngs", "dalys", "first_order", "renewal"),
    [
        (6.50e-3, 10 / 60, 144.23, 6.934, 6.823, 0.9192, 0.9202),
        (6.50e-3, 30 / 60, 144.23, 12.010, 11.679, 0.8868, 0.8877),
        (6.50e-3, 1, 144.23, 16.984, 16.324, 0.8561, 0.8565),
        (6.50e-3, 5, 144.23, 37.978, 34.718, 0.7367, 0.7327),
        (2.34e-3, 5, 400.64, 63.296, 60.007, 0.8420, 0.8395),
        (1.00e-3, 5, 937.50, 96.825, 93.520, 0.8967, 0.8954),
    ],
)
def test_with_writes_at_12288(rate, write, mean, youngs, dalys, first_order, renewal):
    minutes = failure_free_minutes(12288, rate)
    assert minutes == pytest.approx(mean, abs=0.01)
    assert young(write, minutes) == pytest.approx(youngs, abs=6e-4)
    assert daly(write, minutes) == pytest.approx(dalys, abs=6e-4)
    job = Training(minutes, young(write, minutes), write=write)
    assert published(job) == pytest.approx(first_order, abs=6e-5)
    assert exact(job) == pytest.approx(renewal, abs=6e-5)


@pytest.mark.parametrize(("hours", "minutes"), [(24, 116.69), (6, 56.71), (0.25, 9.141)])
def test_dalys_own_table(hours, minutes):
    assert daly(5, hours * 60) == pytest.approx(minutes, abs=6e-3)


@pytest.mark.parametrize("mean", [15, 60, 360, 1440])
def test_daly_is_within_0_3_percent_of_the_optimum(mean):
    def cost(interval):
        return -exact(Training(mean, interval, startup=0.0, write=5.0))

    best = optimize.minimize_scalar(cost, bounds=(0.5, 5 * mean), method="bounded")
    assert daly(5, mean) == pytest.approx(best.x, rel=3e-3)


def test_what_an_ettr_of_0_9_needs_at_12288():
    def shortfall(form, interval, rate, write):
        mean = failure_free_minutes(12288, rate)
        return form(Training(mean, interval(write, mean), write=write)) - 0.9

    def rate(form, interval):
        return optimize.brentq(lambda r: shortfall(form, interval, r, 5), 1e-4, 1e-2) * 1e3

    def write(form, interval):
        return optimize.brentq(lambda w: shortfall(form, interval, RSC1, w), 0.01, 5) * 60

    assert rate(published, young) == pytest.approx(0.9375, abs=6e-5)
    assert rate(exact, daly) == pytest.approx(0.9156, abs=6e-5)
    assert write(published, young) == pytest.approx(20.46, abs=6e-3)
    assert write(exact, daly) == pytest.approx(21.12, abs=6e-3)


def simulated(job, productive, rng):
    """Wall-clock of one run, failure by failure: an independent account of the definition."""
    wall, done = job.queue + job.startup * 0, 0.0
    alive, need_start = rng.exponential(job.mean_minutes), True
    while done < productive:
        span = (job.startup if need_start else 0.0) + job.interval + job.write
        if alive < span:
            wall, alive, need_start = wall + alive + job.queue, rng.exponential(job.mean_minutes), True
        else:
            wall, alive, need_start, done = wall + span, alive - span, False, done + job.interval
    return wall


@pytest.mark.parametrize(
    "job",
    [
        Training(221.54, 60.0, queue=10.0),
        Training(144.23, 37.978, write=5.0),
        Training(17.72, 7.0),
    ],
)
def test_the_exact_form_against_a_simulation_of_its_definition(job):
    rng = np.random.default_rng(17)
    productive = 400 * job.interval
    walls = np.array([simulated(job, productive, rng) for _ in range(60)])
    ratio, error = productive / walls.mean(), productive / walls.mean() ** 2 * walls.std() / np.sqrt(len(walls))
    assert abs(finite(job, productive) - ratio) < 4 * error


def test_without_failures_only_writes_and_the_first_start_count():
    job = Training(math.inf, 60.0, startup=5.0, write=1.0, queue=7.0)
    assert exact(job) == pytest.approx(60 / 61)
    assert finite(job, 600) == pytest.approx(600 / (610 + 12))


@given(
    some.floats(1.0, 1e6),
    some.floats(0.1, 1e4),
    some.floats(0.0, 60.0),
    some.floats(0.0, 60.0),
    some.floats(0.0, 600.0),
)
def test_the_exact_forms_are_shares(mean, interval, startup, write, queue):
    job = Training(mean, interval, startup, write, queue)
    assert 0.0 <= exact(job) <= 1.0
    assert 0.0 <= finite(job, 10 * interval) <= exact(job) + 1e-9
