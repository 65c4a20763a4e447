"""What the recovery benchmark makes of a step log."""

from __future__ import annotations

import pytest
from watched_jobs import Begin, Failed, judged, normal_step_s, read

STEP_S = 0.1
LOST_AT = 1.05  # in the middle of step 10


def run_on(ranks, *, first, last, start, pid):
    """Begins of steps `first` to `last` of several ranks, one step each STEP_S from `start` on."""
    return [
        Begin(start + STEP_S * (step - first), step, rank, pid + rank)
        for step in range(first, last + 1)
        for rank in ranks
    ]


def calm():
    return run_on(range(4), first=0, last=10, start=0.0, pid=100)


def test_a_redone_step_is_a_pause_and_loses_nothing():
    after = run_on([0, 1, 3], first=10, last=14, start=1.25, pid=100) + run_on(
        [2], first=10, last=14, start=1.25, pid=900
    )
    episode = judged(calm() + after, LOST_AT, world=4)
    assert episode.pause_s == pytest.approx(1.35 - LOST_AT - STEP_S)
    assert episode.steps_lost == 0


def test_it_is_not_over_before_the_last_rank_is_back():
    assert judged(calm() + run_on([0, 1, 3], first=10, last=14, start=1.25, pid=100), LOST_AT, world=4) is None


def test_a_rehearsed_step_of_the_joiner_is_no_lost_step():
    after = run_on([0, 1, 3], first=10, last=12, start=1.25, pid=100)
    joiner = [Begin(1.1, 0, 2, 902), *run_on([2], first=10, last=12, start=1.25, pid=900)]
    assert judged(calm() + after + joiner, LOST_AT, world=4).steps_lost == 0


def test_a_restart_loses_the_steps_since_the_checkpoint():
    after = run_on(range(4), first=5, last=14, start=8.0, pid=500)
    episode = judged(calm() + after, LOST_AT, world=4)
    assert episode.steps_lost == 5
    assert episode.pause_s == pytest.approx(8.0 + 6 * STEP_S - LOST_AT - STEP_S)


def test_a_normal_step_is_one_of_one_process():
    twice = calm() + run_on(range(4), first=10, last=12, start=9.0, pid=500)
    assert normal_step_s(twice) == pytest.approx(STEP_S)
    with pytest.raises(Failed, match="no normal step"):
        normal_step_s([])


def test_a_line_that_is_not_whole_waits(tmp_path):
    log = tmp_path / "steps"
    assert read(log) == []
    log.write_text("2.5 1 0 77\n1.5 0 0 77\n3.5 2 0")
    assert read(log) == [Begin(1.5, 0, 0, 77), Begin(2.5, 1, 0, 77)]
