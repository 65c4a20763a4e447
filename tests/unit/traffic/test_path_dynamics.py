"""Paths that fail, slow down and recover; shares of bytes that follow, and do not swing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.traffic.dynamics import DynamicsPolicy, LoadWeights, PathWatch

PATHS = ("a", "b", "c", "d")


def speeds(**changes: float) -> dict[str, float]:
    return dict.fromkeys(PATHS, 100.0) | changes


def test_a_dead_path_is_left_at_once():
    watch = PathWatch(PATHS)
    verdict = watch.step(speeds(b=0.0))
    assert verdict.leave == ("b",)
    assert verdict.reasons == {"b": "nothing arrives"}


def test_a_slow_path_is_left_within_five_steps_and_one_slow_step_is_forgiven():
    watch = PathWatch(PATHS)
    assert watch.step(speeds(c=30.0)).leave == ()
    assert watch.step(speeds()).leave == ()
    left = [watch.step(speeds(c=30.0)).leave for _ in range(5)]
    assert left.index(("c",)) == 2


def test_it_comes_back_after_good_probes_and_waits_longer_each_time():
    watch = PathWatch(PATHS, DynamicsPolicy(quiet=4, longest_quiet=8))
    waits = []
    for _ in range(3):
        watch.step(speeds(b=0.0))
        steps = 1
        while not watch.step(speeds()).use_again:
            steps += 1
        waits.append(steps)
    assert waits == [4, 8, 8]


def test_a_bad_probe_starts_the_count_again():
    watch = PathWatch(PATHS, DynamicsPolicy(quiet=3))
    watch.step(speeds(b=0.0))
    back = [watch.step(speeds(b=speed)).use_again for speed in (100, 100, 20, 100, 100, 100)]
    assert back == [(), (), (), (), (), ("b",)]


def test_the_last_path_is_never_left():
    watch = PathWatch(("a", "b"))
    assert watch.step({"a": 0.0, "b": 100.0}).leave == ("a",)
    assert watch.step({"a": 0.0, "b": 0.0}).leave == ()
    assert watch.avoided == {"a"}


def test_all_equally_slow_is_nobodys_fault():
    watch = PathWatch(PATHS)
    assert all(not watch.step(dict.fromkeys(PATHS, 1.0)).leave for _ in range(10))


@given(st.lists(st.lists(st.floats(85.0, 115.0), min_size=4, max_size=4), min_size=30, max_size=60))
@settings(max_examples=50, deadline=None)
def test_noise_moves_nothing(steps):
    """Speeds within 15 % of each other: no path is left."""
    watch = PathWatch(PATHS)
    for step in steps:
        assert not watch.step(dict(zip(PATHS, step, strict=True))).leave


def test_weights_shift_to_the_faster_path_and_back():
    weights = LoadWeights(("a", "b"))
    for _ in range(30):
        weights.step({"a": 100.0, "b": 50.0})
    assert abs(weights.weights["a"] - 2 / 3) < 0.05
    for _ in range(30):
        weights.step({"a": 100.0, "b": 100.0})
    assert abs(weights.weights["a"] - 0.5) < 0.05
    assert abs(sum(weights.weights.values()) - 1) < 1e-9


def test_weights_do_not_move_for_small_or_short_differences():
    weights = LoadWeights(("a", "b"))
    noise = random.Random(1)
    for _ in range(500):
        weights.step({"a": noise.uniform(95, 105), "b": noise.uniform(95, 105)})
    weights.step({"a": 100.0, "b": 20.0})
    assert weights.changes == 0


def test_two_connections_on_a_shared_slow_path_settle_without_swinging():
    """Closed loop: each path's speed falls with the bytes both put on it; path b loses half its capacity at step 20."""
    first, second = LoadWeights(PATHS), LoadWeights(PATHS)
    history = []
    for step in range(120):
        capacity = dict.fromkeys(PATHS, 100.0) | ({"b": 50.0} if step >= 20 else {})
        seen = {path: capacity[path] / 2 for path in PATHS}  # elastic: each gets half of a path it shares
        first.step(seen)
        second.step(seen)
        history.append(first.weights["b"])
    assert history[19] == 0.25
    assert abs(history[-1] - 1 / 7) < 0.02
    assert all(after <= before + 1e-9 for before, after in zip(history, history[1:], strict=False))
    assert len({round(value, 9) for value in history[60:]}) == 1
    assert first.changes < 15
