"""Findings by number: once new, then updated, then ended; what is no alarm stays quiet; what a check saw stays said."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.control.job import new_job
from keepstep.control.job_state import JobSpec
from keepstep.records.events import Finding, Suspect
from keepstep.service.analysis_wire import Standing
from keepstep.service.bundles import Bundles, Retention
from keepstep.service.finding_book import FindingBook

SLOW = Finding(kind="compute_slow", suspects=((Suspect(rank=3),),), evidence=("it takes long",))


class Kept:
    """A keeper that remembers."""

    def __init__(self, *events: Finding) -> None:
        self.events = events
        self.records: list[Finding] = []

    def keep(self, event: Finding, *, durable: bool = False) -> None:
        assert durable
        self.records.append(event)


class Still:
    """A clock that stands still."""

    def wall(self) -> float:
        return 100.0

    def monotonic(self) -> float:
        return 1.0


@pytest.fixture
def desk(tmp_path: Path):
    kept, said = Kept(), []
    state = new_job(JobSpec("j", 4, 1, "v", b""), 1)
    bundles = Bundles(tmp_path, Retention(9, 1 << 20))
    book = FindingBook(kept, lambda: state, bundles=bundles, clock=Still(), say=said.append)
    yield book, kept.records, said
    bundles.close()


def test_a_finding_lives_once(desk) -> None:
    book, records, said = desk
    assert book.enter(Standing("k", "new", SLOW))
    assert not book.enter(Standing("k", "new", SLOW))  # said again by a new analysis
    assert not book.enter(Standing("k", "updated", SLOW))
    assert not book.enter(Standing("k", "ended", SLOW))
    assert [(r.number, r.status) for r in records] == [(1, "new"), (1, "updated"), (1, "updated"), (1, "ended")]
    assert {(r.job, r.wall, r.bundle) for r in records} == {("j", 100.0, "findings/1")}
    assert len(said) == 2 and "finding 1: compute_slow, rank 3" in said[0] and "ended" in said[1]
    assert book.open == {} and book.numbered(1).status == "ended" and book.words() == ""


def test_one_that_comes_again_is_another_and_an_end_without_a_begin_is_nothing(desk) -> None:
    book, records, _ = desk
    assert not book.enter(Standing("k", "ended", SLOW))
    for status in ("new", "ended", "new"):
        book.enter(Standing("k", status, SLOW))
    assert [r.number for r in records] == [1, 1, 2]
    assert book.words().startswith("finding 2: compute_slow")


def test_what_is_no_alarm_is_not_said_and_has_no_bundle(desk) -> None:
    book, records, said = desk
    book.enter(Standing("k", "new", Finding(kind="imbalance")))
    assert said == [] and book.words() == "" and records[0].bundle == ""


def test_what_a_check_saw_stays_in_every_later_word(desk) -> None:
    book, records, said = desk
    book.enter(Standing("k", "new", SLOW))
    book.note("k", "not replaced: a lock", layer="application")
    book.note("k", "not replaced: a lock", layer="application")
    book.enter(Standing("k", "updated", SLOW))
    assert [(r.layer, len(r.evidence)) for r in records] == [
        ("undetermined", 1),
        ("application", 2),
        ("application", 2),
    ]
    assert said.count("not replaced: a lock") == 1
    book.end("k", "it moved")
    assert records[-1].status == "ended" and records[-1].evidence[-1] == "ended: it moved"
    book.end("none", "nothing")
    assert len(records) == 4


def test_numbers_go_on_behind_those_of_an_earlier_controller(tmp_path: Path) -> None:
    earlier = [Finding(kind="crash", number=number, status="updated") for number in (1, 2, 0)]
    kept = Kept(*earlier)
    state = new_job(JobSpec("j", 4, 1, "v", b""), 1)
    bundles = Bundles(tmp_path, Retention(9, 1 << 20))
    book = FindingBook(kept, lambda: state, bundles=bundles, clock=Still(), say=lambda text: None)
    assert book.enter(Standing("k", "new", SLOW)) and [(r.number, r.bundle) for r in kept.records] == [
        (3, "findings/3")
    ]
    assert book.numbered(2) == earlier[1] and book.numbered(0) is None
    bundles.close()


def test_with_a_finding_ends_what_narrows_it(desk) -> None:
    book, records, _ = desk
    book.enter(Standing("k", "new", SLOW))
    for number, key in ((1, "probe:1"), (2, "probe:2")):
        book.enter(Standing(key, "new", Finding(kind="compute_slow", refers=number)))
    book.enter(Standing("other", "new", SLOW))
    book.enter(Standing("k", "ended", SLOW))
    assert [(r.number, r.status) for r in records[4:]] == [(1, "ended"), (2, "ended"), (3, "ended")]
    assert list(book.open) == ["other"] and "finding 2, which it narrows" in records[-1].evidence[-1]


def test_one_that_turns_out_to_be_an_alarm_is_said_and_gets_evidence(desk) -> None:
    book, records, said = desk
    assert book.enter(Standing("k", "new", Finding(kind="imbalance")))
    assert book.enter(Standing("k", "updated", SLOW))
    assert said == ["finding 1: compute_slow, rank 3 (100% sure)"] and records[-1].bundle == "findings/1"
    assert not book.enter(Standing("k", "updated", Finding(kind="imbalance")))
    assert said[1:] == ["finding 1 is no alarm any more: imbalance (100% sure)"]


def test_what_an_earlier_controller_left_standing_has_ended(tmp_path: Path) -> None:
    slow = [Finding(kind="compute_slow", number=number, suspects=((Suspect(rank=number),),)) for number in (1, 2)]
    kept, said = Kept(*slow, Finding(kind="compute_slow", number=1, status="ended")), []
    state = new_job(JobSpec("j", 4, 1, "v", b""), 1)
    bundles = Bundles(tmp_path, Retention(9, 1 << 20))
    book = FindingBook(kept, lambda: state, bundles=bundles, clock=Still(), say=said.append)
    book.end_left()
    bundles.close()
    (ended,) = kept.records
    assert (ended.number, ended.status, ended.suspects) == (2, "ended", ((Suspect(rank=2),),))
    assert "another controller took over" in ended.evidence[-1] and book.numbered(2) == ended
    assert said == ["finding 2 has ended with its controller: compute_slow, rank 2 (100% sure)"]
