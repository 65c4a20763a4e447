"""What a controller keeps in memory is enough for its report."""

from __future__ import annotations

import pytest

from keepstep.fleet.report import FOR_THE_REPORT, summarise
from keepstep.records.events import (
    CoverageRecord,
    DrillRecord,
    Event,
    Finding,
    Incident,
    JobEnded,
    JobStarted,
    LeaderRecord,
    MoveRecord,
    StepProgress,
)
from keepstep.service.keeper import Keeper
from keepstep.store.journal import MemoryJournal

MOVE = MoveRecord(
    number=1, outcome="made", ranks=(1,), leavers=("m1",), joiners=("m2",), origins=("n0",), nodes=("n1",), refused=0
)
ENDED = JobEnded(job="j", wall=9.0, exit_code=0, steps_kept=7)
RECORDS: list[Event] = [
    JobStarted(job="j", script="train.py", world=2, wall=1.0),
    LeaderRecord(job="j", wall=1.0, epoch=1),
    DrillRecord(fault="kill", rank=1, step=3, wall=2.0),
    Incident(kind="crash", rank=1, node="n1", onset_wall=2.0, steps_recomputed=0, bytes_moved=9, members_changed=1),
    Finding(kind="crash", number=1, rank=1),
    MOVE,
    CoverageRecord(),
    StepProgress(step=5),
    StepProgress(step=6),
]


def recalled(journal: MemoryJournal) -> Keeper:
    keeper = Keeper(journal)
    keeper.recall()
    return keeper


@pytest.mark.parametrize("end", [[], [ENDED]], ids=["running", "ended"])
def test_the_report_of_a_controller_is_that_of_the_journal(end: list[Event]) -> None:
    journal = MemoryJournal()
    keeper = Keeper(journal)
    for record in [*RECORDS, *end]:
        keeper.keep(record)
    for one in (keeper, recalled(journal)):
        assert summarise(one.events) == summarise(journal.replay())
        assert summarise(one.events).moves == (MOVE,)


@pytest.mark.parametrize("kind", FOR_THE_REPORT)
def test_every_kind_that_a_report_reads_is_kept(kind: type[Event]) -> None:
    keeper = Keeper(MemoryJournal())
    whole = RECORDS if kind is StepProgress else [*RECORDS, ENDED]
    for record in whole:
        keeper.keep(record)
    others = [record for record in whole if not isinstance(record, kind)]
    assert summarise(others) != summarise(keeper.events), "it changes no report"


def test_progress_does_not_pile_up() -> None:
    keeper = Keeper(MemoryJournal())
    for step in range(100):
        keeper.keep(StepProgress(step=step))
    assert len(keeper.events) == 1 and summarise(keeper.events).steps_kept == 99
