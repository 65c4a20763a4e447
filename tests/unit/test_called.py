"""Who called what: disagreements among the collectives that members recorded last."""

from __future__ import annotations

from keepstep.diagnosis.called import disagreements
from keepstep.records.events import Suspect
from keepstep.records.watch_messages import Called, CallMade

ALL_REDUCE, BROADCAST, FLOAT32 = 1, 3, 10


def told(
    rank: int, *counts: int, op: int = ALL_REDUCE, first: int = 10, generation: int = 1, name: str = "dp"
) -> Called:
    calls = (CallMade(7, name, first + i, op, FLOAT32, count, 0) for i, count in enumerate(counts))
    return Called(f"m{rank}", rank, generation, tuple(calls))


def test_members_that_agree_give_nothing() -> None:
    assert disagreements([told(rank, 8, 9, 10) for rank in range(4)]) == []
    assert disagreements([]) == []


def test_another_shape_names_the_minority_and_what_each_called() -> None:
    (finding,) = disagreements([told(0, 8, 8), told(1, 8, 9), told(2, 8, 8)])
    assert (finding.kind, finding.layer, finding.group, finding.sequence) == (
        "collective_mismatch",
        "application",
        "dp",
        11,
    )
    assert finding.suspects == ((Suspect(rank=1),),) and finding.victims == (0, 2)
    assert "rank 1: all_reduce, 9 elements of float32" in finding.evidence


def test_another_operation() -> None:
    (finding,) = disagreements([told(0, 8), told(1, 8, op=BROADCAST), told(2, 8)])
    assert finding.suspects == ((Suspect(rank=1),),)
    assert any("broadcast" in line for line in finding.evidence)


def test_two_members_cannot_say_who_is_wrong() -> None:
    (finding,) = disagreements([told(0, 8), told(1, 9)])
    assert len(finding.suspects) == 1 and len(finding.suspects[0]) == 2


def test_of_two_members_the_one_that_calls_something_new_is_wrong() -> None:
    (finding,) = disagreements([told(0, 8, 4, 8), told(1, 8, 4, 9)])
    assert finding.suspects == ((Suspect(rank=1),),) and finding.victims == (0,)
    (finding,) = disagreements([told(0, 8, 4, 4), told(1, 8, 4, 8)])
    assert len(finding.suspects[0]) == 2  # both are usual here


def test_what_was_told_twice_is_joined_and_a_closed_group_keeps_its_name() -> None:
    (finding,) = disagreements([told(0, 8, 8), told(1, 8), told(1, 9, first=11, name=""), told(2, 8, 8)])
    assert finding.group == "dp" and finding.suspects == ((Suspect(rank=1),),)


def test_an_older_generation_does_not_count() -> None:
    assert disagreements([told(0, 8, generation=2), told(1, 9, generation=1), told(2, 8, generation=2)]) == []
