"""Rules for lemons, judged forward in time: the public trace, planted lemons, and no look into the future."""

from __future__ import annotations

import numpy as np
import pytest
from fault_list import HORIZON, NODES, faults

from keepstep.fleet.lemon_features import feature_matrix, forward_scores
from keepstep.fleet.lemons import (
    NodeEvents,
    at_equal_flags,
    counts_before,
    days_before,
    judge_dates,
    judge_rule,
    outcomes_after,
    told_apart,
    tuned_decay,
)


def trace():
    return NodeEvents(faults().node, faults().start, NODES)


def rng():
    return np.random.default_rng(1)


def test_dates_of_the_trace():
    assert judge_dates(HORIZON).tolist() == [28.0 * number for number in range(1, 12)]


@pytest.mark.parametrize(("least", "flagged", "hits"), [(1, 362, 78), (2, 100, 30), (3, 29, 9)])
def test_flags_of_the_trace(least, flagged, hits):
    dates = judge_dates(HORIZON)
    outcome = outcomes_after(trace(), dates)
    found = judge_rule("", counts_before(trace(), dates) >= least, outcome=outcome, rng=rng())
    assert (found.node_dates, found.failing) == (4400, 379)
    assert found.base_rate == pytest.approx(0.0861, abs=6e-5)
    assert (found.flagged, found.hits) == (flagged, hits)
    assert found.low < found.precision < found.high
    assert found.recall == pytest.approx(hits / 379)
    assert found.lift == pytest.approx(found.precision / found.base_rate)
    assert found.idle_node_days == (flagged - hits) * 28


def test_no_rule_is_told_apart_from_two_in_28_days_at_equal_flags():
    """Decayed counts and a fitted score name a few more, within chance: the absence of a better rule is the answer."""
    dates = judge_dates(HORIZON)
    flags = counts_before(trace(), dates) >= 2
    outcome = outcomes_after(trace(), dates)
    features = feature_matrix({"taken_out": trace()}, dates)
    for scores in (tuned_decay(trace(), dates, flags=flags), forward_scores(features, outcome, dates=dates)):
        others = at_equal_flags(scores, flags)
        assert others.sum() == flags.sum() == 100
        found = told_apart(("other", others), (">= 2", flags), outcome=outcome, rng=rng())
        assert found.verdict == "not told apart"


def planted(seed=4, nodes=300, days=300):
    """Three in ten nodes fail ten times as often."""
    chance = np.random.default_rng(seed)
    rates = np.where(np.arange(nodes) % 10 < 3, 0.03, 0.003)
    when = [np.sort(chance.uniform(0, days, count)) for count in chance.poisson(rates * days)]
    return NodeEvents(np.repeat(np.arange(nodes), [len(one) for one in when]), np.concatenate(when), nodes)


def test_planted_lemons_are_found():
    events, dates = planted(), judge_dates(300)
    found = judge_rule("", counts_before(events, dates) >= 2, outcome=outcomes_after(events, dates), rng=rng())
    assert found.lift > 2
    assert found.low > found.base_rate


def test_a_better_rule_is_told_apart():
    chance = np.random.default_rng(8)
    outcome = chance.random((11, 200)) < 0.1
    flags = chance.random(outcome.shape) < 0.05
    knowing = at_equal_flags(outcome + 0.01 * chance.random(outcome.shape), flags)
    assert told_apart(("knows", knowing), ("guesses", flags), outcome=outcome, rng=rng()).verdict == "better"
    assert told_apart(("guesses", flags), ("knows", knowing), outcome=outcome, rng=rng()).verdict == "worse"


def test_no_rule_looks_into_the_future():
    """Scores at a date stay the same when everything after it is changed."""
    events, dates = planted(), judge_dates(300)
    cut = dates[5]
    past = events.day <= cut
    changed = NodeEvents(
        np.concatenate([events.node[past], np.arange(events.nodes)]),
        np.concatenate([events.day[past], np.full(events.nodes, cut + 1.0)]),
        events.nodes,
    )
    for one, other in zip(scores_of(events, dates), scores_of(changed, dates), strict=True):
        assert np.array_equal(one[:6], other[:6])


def scores_of(events, dates):
    flags, outcome = counts_before(events, dates) >= 2, outcomes_after(events, dates)
    features = feature_matrix({"taken_out": events}, dates)
    return flags, tuned_decay(events, dates, flags=flags), forward_scores(features, outcome, dates=dates)


def test_without_signals_there_are_no_features():
    assert feature_matrix({}, np.arange(3)).shape == (3, 0, 0)


def test_single_node_rate_is_a_feature():
    events, dates = planted(), judge_dates(300)
    days = np.full((len(dates), events.nodes), 20.0)
    plain = feature_matrix({"single_node_failures": events}, dates)
    assert (
        feature_matrix({"single_node_failures": events}, dates, single_node_days=days).shape[-1] == plain.shape[-1] + 1
    )


def test_days_of_jobs_before_a_date():
    spans = np.array([0.0, 20.0, 50.0]), np.array([10.0, 40.0, 90.0])
    found = days_before(np.array([0, 0, 1]), spans, dates=np.array([28.0, 56.0]), nodes=3)
    assert found.tolist() == [[18.0, 0.0, 0.0], [12.0, 6.0, 0.0]]


def test_no_flags_have_no_precision():
    found = judge_rule("", np.zeros((2, 3), bool), outcome=np.ones((2, 3), bool), rng=rng())
    assert np.isnan(found.precision)
    assert (found.recall, found.flagged) == (0.0, 0)
