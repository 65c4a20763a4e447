"""The account of the diagnosis benchmark: what counts as right, exact, late, and a wrong alarm; its intervals."""

from __future__ import annotations

import pytest
from drill_answers import (
    Case,
    alarms,
    answer_of,
    blames,
    bootstrap,
    false_alarms,
    poisson,
    scores,
    verdict_of,
    wilson,
    wrong_alarms,
)

from keepstep.records.drills import DRILLS, DrillRequest

SLOW = answer_of(DrillRequest("slow-compute", 3, factor=1.3))


def finding(number: int, wall: float, *suspects: list[dict], kind: str = "compute_slow", **more) -> dict:
    return {"record": "Finding", "number": number, "wall": wall, "kind": kind, "suspects": list(suspects), **more}


def case(*records: dict, answers=(SLOW,)) -> Case:
    began = [10.0] * len(answers)
    return Case("c", list(answers), began, 1.3, [verdict_of(r) for r in records], steps=[9.5, 10.5, 11.0, 11.5])


def test_every_drill_has_an_answer():
    for fault in DRILLS:
        link = {"source": 0, "destination": 2} if "link" in fault else {}
        assert answer_of(DrillRequest(fault, 1, **link, node="n1" if "node" in fault else "")).exact


def test_a_right_and_exact_finding():
    (score,) = scores(case(finding(1, 11.2, [{"rank": 3}], layer="host_cpu")))
    assert (score.found, score.exact, score.layer, score.steps) == (True, True, True, 2)
    assert score.seconds == pytest.approx(1.2)


def test_a_set_that_is_too_large_and_another_layer():
    (score,) = scores(case(finding(1, 11.2, [{"rank": 3}, {"rank": 2}], layer="storage")))
    assert (score.found, score.exact, score.layer) == (True, False, False)


@pytest.mark.parametrize(
    "record",
    [
        finding(1, 9.0, [{"rank": 3}]),
        finding(1, 11.0, [{"rank": 2}]),
        finding(1, 11.0, [{"rank": 3}], kind="communication_slow"),
        finding(1, 11.0, [{"rank": 3}], status="ended"),
        finding(1, 11.0),
    ],
)
def test_what_does_not_count(record):
    (score,) = scores(case(record))
    assert (score.found, score.seconds, score.steps) == (False, None, None)


def test_the_last_word_on_a_finding_decides_whether_it_is_a_wrong_alarm():
    wrong, right = finding(1, 11.0, [{"rank": 2}]), finding(1, 12.0, [{"rank": 3}], status="updated")
    assert wrong_alarms(case(wrong, right)) == []
    assert [v.number for v in wrong_alarms(case(right, wrong))] == [1]
    assert wrong_alarms(case(finding(2, 11.0, [{"rank": 2}], kind="imbalance"))) == []


def test_two_faults_are_two_findings():
    link = answer_of(DrillRequest("throttle-link", source=4, destination=6, factor=2.0))
    both = case(
        finding(1, 11.0, [{"rank": 3}]),
        finding(2, 11.5, [{"link": [4, 6]}], kind="communication_slow"),
        answers=(SLOW, link),
    )
    assert [score.exact for score in scores(both)] == [True, True] and wrong_alarms(both) == []


def test_a_loss_is_named_by_its_incident():
    crash = answer_of(DrillRequest("kill", 3))
    record = {
        "record": "Incident",
        "kind": "crash",
        "rank": 3,
        "number": 1,
        "wall": 99.0,
        "onset_wall": 10.0,
        "detected": 0.1,
    }
    (score,) = scores(case(record, answers=(crash,)))
    assert score.exact and score.seconds == pytest.approx(0.1)


def test_a_stall_of_all_that_blames_nobody_is_no_false_alarm():
    stall = verdict_of(finding(1, 1.0, kind="noncommunication_hang", layer="storage"))
    blame = verdict_of(finding(2, 1.0, [{"rank": 1}], kind="noncommunication_hang", layer="storage"))
    assert (blames(stall), blames(blame)) == (False, True)
    assert sorted(alarms([stall, blame])) == [1, 2]


def test_a_finding_that_comes_again_is_another_alarm():
    def said(status: str, kind: str = "compute_slow") -> dict:
        return finding(5, 1.0, [{"rank": 1}], kind=kind, status=status)

    told = [said("new", "imbalance"), said("updated"), said("updated"), said("ended"), said("new"), said("ended")]
    assert len(false_alarms([verdict_of(record) for record in told])) == 2


def test_intervals_against_known_values():
    """Wilson for 5 of 10 as in Brown, Cai, DasGupta 2001; Garwood for 0 and 5 events in 1000."""
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert poisson(0, 1000.0) == pytest.approx((0.0, 0.0036889), abs=1e-6)
    assert poisson(5, 1000.0) == pytest.approx((0.0016235, 0.0116683), abs=1e-6)
    low, high = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1.0 <= low <= 3.0 <= high <= 100.0
