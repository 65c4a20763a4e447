"""Start-up findings: never arrived, died, disagrees; and nothing while the start may still go well."""

from __future__ import annotations

import pytest

from keepstep.diagnosis.arrival import Arrival, ArrivalFacts, judge_arrivals
from keepstep.records.finding import Suspect


def start(rank: int, took: float | None = 10.0, **more) -> Arrival:
    fields = {"world": 4, "keepstep_version": "1", "torch_version": "2"} if took is not None else {}
    arrived = None if took is None else 100.0 + took
    return Arrival(rank, f"n{rank // 2}", 100.0, arrived, **{**fields, **more})


def judged(*starts: Arrival, now: float = 130.0):
    return judge_arrivals(ArrivalFacts(4, starts), now)


def test_a_good_start_is_nothing():
    assert judged(*(start(rank) for rank in range(4))) == ()


@pytest.mark.parametrize(("now", "count"), [(119.9, 0), (120.1, 1)])
def test_who_never_comes_is_missed_by_what_the_others_needed(now, count):
    found = judged(start(0), start(1), start(2, 9.0), start(3, None), now=now)
    assert len(found) == count
    for finding in found:
        assert finding.kind == "startup_never_arrived"
        assert finding.suspects == ((Suspect(rank=3),),)
        assert finding.victims == (0, 1, 2)


def test_a_whole_node_that_is_missing_is_one_finding():
    (finding,) = judged(start(0), start(1), start(2, None), start(3, None))
    assert finding.suspects == ((Suspect(node="n1"),),)


def test_where_hardly_anybody_has_come_nobody_is_missed():
    assert judged(start(0), start(1, None), start(2, None), start(3, None), now=10_000.0) == ()


@pytest.mark.parametrize(("code", "words"), [(1, "exit code 1"), (137, "signal 9"), (0, "exit code 0")])
def test_who_ends_before_it_joins_has_died(code, words):
    (finding,) = judged(start(0), start(1, None, exited=code), start(2), start(3))
    assert (finding.kind, finding.suspects) == ("startup_died", ((Suspect(rank=1),),))
    assert words in finding.evidence[0]


@pytest.mark.parametrize("what", [{"world": 5}, {"keepstep_version": "0"}, {"torch_version": "3"}])
def test_the_minority_disagrees(what):
    (finding,) = judged(start(0), start(1), start(2, **what), start(3))
    assert (finding.kind, finding.layer) == ("startup_disagrees", "configuration")
    assert finding.suspects == ((Suspect(rank=2),),)


def test_two_against_two_is_a_set():
    (finding,) = judged(start(0), start(1), start(2, world=5), start(3, world=5))
    assert finding.suspects == (tuple(Suspect(rank=rank) for rank in range(4)),)


def test_ranks_out_of_the_world_and_doubles_do_no_harm():
    assert judged(start(0, None), start(0), start(1), start(2), start(3), start(9), start(-1)) == ()
