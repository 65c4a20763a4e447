"""Merging faults into episodes: the public trace, and the merge done one by one."""

from __future__ import annotations

import numpy as np
import pytest
from fault_list import HORIZON, LAST_DAY, NODES, faults
from hypothesis import given
from hypothesis import strategies as some

from keepstep.fleet.episodes import Faults, again_within, episode_effect, merge, time_down


@pytest.mark.parametrize(
    ("gap", "episodes", "rate", "vmr"),
    [(0.0, 582, 4.268, 2.56), (0.25, 479, 3.513, 1.91), (1.0, 452, 3.315, 1.75), (7.0, 401, 2.945, 1.37)],
)
def test_merging_the_trace(gap, episodes, rate, vmr):
    effect = episode_effect(faults(), gap, nodes=NODES, horizon=LAST_DAY)
    assert effect.episodes == episodes
    assert effect.per_1000_up_days == pytest.approx(rate, abs=6e-4)
    assert effect.vmr == pytest.approx(vmr, abs=6e-3)


def test_repair_and_availability_of_the_trace():
    trace = faults()
    days = trace.end - trace.start
    found = (days.mean(), np.median(days), np.quantile(days, 0.9), days.max())
    assert found == pytest.approx((5.54, 0.85, 12.97, 130.96), abs=6e-3)
    assert int((days == 0).sum()) == 14
    assert time_down(trace) == pytest.approx(3231.3, abs=0.05)
    assert 1 - time_down(trace) / (NODES * HORIZON) == pytest.approx(0.9768, abs=6e-5)


def test_another_start_within_28_days():
    again, judged = again_within(faults(), 28.0, horizon=HORIZON)
    assert (again, judged) == (214, 529)
    assert again / judged == pytest.approx(0.405, abs=6e-4)


def merged_one_by_one(faults, gap):
    found = []
    for node, start, end in zip(faults.node, faults.start, faults.end, strict=True):
        if found and found[-1][0] == node and start - found[-1][2] <= gap:
            found[-1][2] = max(found[-1][2], end)
        else:
            found.append([node, start, end])
    return [tuple(episode) for episode in found]


spans = some.tuples(some.integers(0, 3), some.integers(0, 400), some.integers(0, 40))


@given(some.lists(spans, max_size=40), some.integers(0, 20))
def test_merging_is_what_it_says(rows, gap):
    ends = [(row[1] + row[2]) / 4 for row in rows]
    whole = Faults.of([row[0] for row in rows], [row[1] / 4 for row in rows], end=ends)
    merged = merge(whole, gap / 4)
    assert list(zip(merged.node, merged.start, merged.end, strict=True)) == merged_one_by_one(whole, gap / 4)
