"""Periods and health checks compared: planted effects are found, the mix of jobs is none, little data cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.fleet.comparison import PeriodRuns, compare_periods
from keepstep.fleet.effect import PeriodCounts, alarms, effect_of
from keepstep.fleet.investment import Costs, investments

HOUR = 3_600_000_000


def runs(rng, count, *, kept, large=0.5):
    """Jobs of two classes; large ones keep 10 points less. The later period may have another mix."""
    stratum = (rng.random(count) < large).astype(int)
    hours = rng.uniform(10, 100, count)
    return PeriodRuns(stratum, hours * np.clip(kept - 0.1 * stratum + rng.normal(0, 0.05, count), 0, 1), hours)


def compared(before, after):
    return compare_periods("kept", ("off", "automatic"), before=before, after=after, rng=np.random.default_rng(5))


def test_a_planted_gain_is_found_with_its_size():
    rng = np.random.default_rng(1)
    after = runs(rng, 400, kept=0.90)
    found = compared(runs(rng, 400, kept=0.85), after)
    assert found.verdict == "better"
    assert found.low < 0.05 < found.high
    assert found.recovered == pytest.approx(found.difference * after.below.sum())
    assert found.matched_share == 1.0


def test_another_mix_of_jobs_is_no_effect():
    rng = np.random.default_rng(2)
    found = compared(runs(rng, 600, kept=0.9, large=0.8), runs(rng, 600, kept=0.9, large=0.2))
    assert found.verdict == "cannot tell"
    assert abs(found.difference) < 0.01


def test_a_loss_is_called_one():
    rng = np.random.default_rng(3)
    assert compared(runs(rng, 400, kept=0.9), runs(rng, 400, kept=0.8)).verdict == "worse"
    less = compare_periods(
        "affected",
        ("off", "automatic"),
        before=runs(rng, 400, kept=0.9),
        after=runs(rng, 400, kept=0.8),
        rng=rng,
        higher_is_better=False,
    )
    assert less.verdict == "better"


def test_too_few_or_unlike_jobs_cannot_tell():
    rng = np.random.default_rng(4)
    assert compared(runs(rng, 10, kept=0.9), runs(rng, 400, kept=0.1)).verdict.startswith("cannot tell: fewer than 20")
    found = compared(runs(rng, 50, kept=0.9, large=0.0), runs(rng, 50, kept=0.9, large=1.0))
    assert found.verdict.startswith("cannot tell: no class")
    assert np.isnan(found.difference)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(6)
    covered = [
        found.low <= 0.0 <= found.high
        for found in (compared(runs(rng, 60, kept=0.9), runs(rng, 60, kept=0.9)) for _ in range(60))
    ]
    assert np.mean(covered) > 0.85


def test_large_groups_use_the_same_estimate():
    rng = np.random.default_rng(7)
    found = compared(runs(rng, 5000, kept=0.85), runs(rng, 5000, kept=0.90))
    assert found.low < 0.05 < found.high
    assert found.high - found.low < 0.02


def test_a_check_that_helps():
    """512-GPU jobs of the paper: 14 % to 4 % with the lemons out, while nothing changed elsewhere."""
    found = effect_of(
        "lemon",
        "day 100",
        treated=(PeriodCounts(140, 1000.0), PeriodCounts(40, 1000.0)),
        compared=(PeriodCounts(120, 1000.0), PeriodCounts(118, 1000.0)),
    )
    assert found.verdict == "fewer failures are seen with it"
    assert found.ratio == pytest.approx(0.29, abs=0.01)
    assert (found.treated_before, found.compared_after) == (140.0, 118.0)


def test_what_falls_everywhere_is_not_the_check():
    cells = PeriodCounts(140, 1000.0), PeriodCounts(70, 1000.0)
    assert effect_of("check", "", treated=cells, compared=cells).verdict == "cannot tell"


def test_no_comparison_no_verdict():
    cells = PeriodCounts(140, 1000.0), PeriodCounts(7, 1000.0)
    assert effect_of("check", "", treated=cells, compared=None).verdict.endswith("no group without the check")
    few = PeriodCounts(2, 1000.0), PeriodCounts(0, 1000.0)
    assert "fewer than 5" in effect_of("check", "", treated=cells, compared=few).verdict


def test_bursts_widen_the_interval():
    even = (PeriodCounts(100, 1000.0), PeriodCounts(70, 1000.0))
    bursts = (PeriodCounts(100, 1000.0, 4.0), PeriodCounts(70, 1000.0, 4.0))
    narrow = effect_of("", "", treated=even, compared=(PeriodCounts(100, 1000.0),) * 2)
    wide = effect_of("", "", treated=bursts, compared=(PeriodCounts(100, 1000.0),) * 2)
    assert narrow.verdict == "cannot tell" or narrow.high < 1
    assert wide.high - wide.low > narrow.high - narrow.low


def test_alarms_are_confirmed_by_what_follows():
    found = alarms(
        "gpu",
        (np.array([1, 1, 2, 3]), np.array([10, 500, 20, 30])),
        confirmed_at=(np.array([1, 2]), np.array([15, 200])),
        out_hours=np.array([1.0, 2.0, 3.0, 4.0]),
        good_jobs_hit=0.004,
        window=100,
    )
    assert (found.fired, found.confirmed, found.false_alarms, found.idle_node_hours) == (4, 1, 3, 9.0)
    assert found.false_share == 0.75


def test_investments_are_ranked_by_what_they_cost():
    costs = Costs(
        cause=np.array([0, 0, 1]),
        owner=np.array([0, 0, 1]),
        gpus=np.array([8, 8, 1024]),
        event=np.array([True, False, True]),
        detect=np.array([HOUR, HOUR, HOUR // 4]),
        repair=np.array([HOUR, HOUR, 0]),
        recompute=np.array([HOUR, 0, HOUR // 2]),
        second=np.array([0, 0, 100 * HOUR]),
    )
    first, second = investments(costs, causes=("fan", "link"), owners=("hardware", "network"))
    assert (first.cause, first.owner, first.events, first.gpu_hours) == ("link", "network", 1, 868.0)
    assert (second.detect, second.repair, second.recompute, second.second_order) == (16.0, 16.0, 8.0, 0.0)
    assert (second.events, second.failures) == (1, 2)
    assert first.low < first.gpu_hours < first.high
    assert first.share + second.share == pytest.approx(1.0)
