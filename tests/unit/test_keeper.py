"""What a controller keeps in memory is enough for its report."""

from __future__ import annotations

import pytest

from keepstep.fleet.report import summarise
from keepstep.records.events import (
    CoverageRecord,
    DrillRecord,
    Event,
    Finding,
    Incident,
    JobEnded,
    JobStarted,
    MoveRecord,
    StepProgress,
)
from keepstep.service.keeper import Keeper
from keepstep.store.journal import MemoryJournal

MOVE = MoveRecord(
    number=1, outcome="made", ranks=(1,), leavers=("m1",), joiners=("m2",), origins=("n0",), nodes=("n1",), refused=0
)
RECORDS: list[Event] = [
    JobStarted(job="j", script="train.py", world=2, wall=1.0),
    DrillRecord(fault="kill", rank=1, step=3, wall=2.0),
    Incident(kind="crash", rank=1, node="n1", onset_wall=2.0, steps_recomputed=0, bytes_moved=9, members_changed=1),
    Finding(kind="crash", number=1, rank=1),
    MOVE,
    CoverageRecord(),
    StepProgress(step=5),
    JobEnded(job="j", wall=9.0, exit_code=0, steps_kept=7),
]


@pytest.mark.parametrize("recalled", [False, True])
def test_the_report_of_a_controller_is_that_of_the_journal(recalled):
    journal = MemoryJournal()
    keeper = Keeper(journal)
    for record in RECORDS:
        keeper.keep(record)
    if recalled:
        keeper = Keeper(journal)
        keeper.recall()
    assert summarise(keeper.events) == summarise(journal.replay())
    assert summarise(keeper.events).moves == (MOVE,)
