"""The ledger adds up to the microsecond whatever comes in (G-21), and says what happened where that is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from fleet_rows import attempt, attempts, rows_of, us
from hypothesis import given
from hypothesis import strategies as some

from keepstep.fleet.attempt_arrays import exact_sum
from keepstep.fleet.ledger import LABELS, LOSSES, Assumptions, assumed, ledger_lines, lost_work, unaccounted
from keepstep.fleet.ledger_journal import PRIORITY, Attempted, checkpoint_ages, journal_ledger, standby_gpus
from keepstep.fleet.ledger_spans import Spans, paint

MINUTE, HOUR = 60, 3600
ENDS = ("completed", "node_fail", "user", "preempted", "cancelled", "timeout", "running", "requeued", "unknown")


def minutes(row):
    """What is not 0 in one row of a ledger, in minutes."""
    return {label: value / 6e7 for label, value in zip(LABELS, row, strict=True) if value}


def one(**given):
    return assumed(attempts(attempt(1, 0, given.pop("length"), **given)), Assumptions())[0]


@pytest.mark.parametrize(
    ("seconds", "gpus", "gpu_hours"), [(10 * MINUTE, 8, 1.333), (5 * HOUR, 1024, 512.0), (1800, 8, 4.0), (1801, 8, 4.0)]
)
def test_lost_work_by_the_published_rule(seconds, gpus, gpu_hours):
    assert lost_work([seconds * 10**6], 3600 * 10**6)[0] * gpus / 3.6e9 == pytest.approx(gpu_hours, abs=5e-4)


def test_the_true_age_of_the_checkpoint_is_better():
    lost = lost_work([10**9, 10**9, 10**9], 3600 * 10**6, age=[5, -1, 2 * 10**9])
    assert lost.tolist() == [5, 10**9, 10**9]


def test_labels_by_ending():
    assert minutes(one(length=2 * HOUR)) == {"start_up": 5, "kept_step": 115}
    assert minutes(one(length=2 * HOUR, how="node_fail")) == {"start_up": 5, "kept_step": 85, "recomputation": 30}
    assert minutes(one(length=2 * HOUR, how="user")) == {"start_up": 5, "kept_step": 85, "user_failure": 30}
    assert minutes(one(length=2 * HOUR, how="preempted")) == {"start_up": 5, "kept_step": 85, "preemption": 30}
    assert minutes(one(length=2 * HOUR, how="preempted", victim_of=7)) == {
        "start_up": 5,
        "kept_step": 85,
        "second_order": 30,
    }
    assert minutes(one(length=2 * HOUR, how="cancelled")) == {"start_up": 5, "kept_step": 85, "unknown": 30}
    assert minutes(one(length=4 * MINUTE, how="node_fail")) == {"recomputation": 4}


def test_a_later_life_starts_under_the_label_of_what_ended_the_one_before():
    rows = [
        attempt(1, 0, HOUR, run_id=1, life=0, how="node_fail"),
        attempt(2, HOUR, 2 * HOUR, run_id=1, life=1, how="preempted", victim_of=9),
        attempt(3, 2 * HOUR, 3 * HOUR, run_id=1, life=2, how="preempted"),
        attempt(4, 3 * HOUR, 4 * HOUR, run_id=1, life=3),
    ]
    ledger = assumed(attempts(*rows), Assumptions())
    assert [next(iter(set(minutes(row)) - {"kept_step", "recomputation"})) for row in ledger[:1]] == ["start_up"]
    assert minutes(ledger[1])["restart"] == 5
    assert minutes(ledger[2])["second_order"] == 5
    assert minutes(ledger[3])["preemption"] == 5


def test_checkpoints_that_stand_still_are_counted():
    rule = Assumptions(startup=0, interval=50 * 60 * 10**6, write=10 * 60 * 10**6)
    assert minutes(assumed(attempts(attempt(1, 0, 3 * HOUR)), rule)[0]) == {"kept_step": 150, "checkpoint_io": 30}


lives = some.tuples(
    some.integers(0, 10**6), some.integers(-10, 10**6), some.sampled_from(ENDS), some.integers(0, 3), some.booleans()
)


@given(some.lists(lives, max_size=30), some.integers(0, 10**10), some.integers(0, 10**10), some.integers(0, 10**9))
def test_it_adds_up_whatever_comes_in(lives, interval, startup, write):
    rows = [
        attempt(
            number,
            start,
            None if how == "running" else start + length + 1e-6,
            how=how,
            run_id=run,
            victim_of=5 if victim else None,
            suspended_us=int(victim) * 77_000_003,
        )
        for number, (start, length, how, run, victim) in enumerate(lives)
    ]
    columns = attempts(*rows)
    ledger = assumed(columns, Assumptions(interval, startup, write))
    assert unaccounted(ledger, columns.length) == 0
    assert (ledger >= 0).all()
    assert set(np.flatnonzero(ledger.sum(axis=0))) <= set(range(len(LABELS)))


def test_sums_beyond_64_bits_are_exact():
    assert exact_sum([2**62] * 7 + [-3, 1]) == 7 * 2**62 - 2


def test_lines_add_up():
    lines = ledger_lines({"kept_step": 3 * 10**9, "restart": 10**9})
    assert [(line.label, line.share) for line in lines] == [("kept_step", 0.75), ("restart", 0.25)]
    assert sum(line.gpu_us for line in lines) == 4 * 10**9
    assert ledger_lines({}) == ()


def painted_by_the_second(begin, end, spans, priority, ground):
    """The same by asking each microsecond."""
    seconds = dict.fromkeys(priority, 0)
    for moment in range(begin, end):
        there = {label for label, start, stop in spans if start <= moment < stop}
        seconds[max(there, key=priority.index) if there else ground] += 1
    return [seconds[label] for label in sorted(priority)]


pieces = some.tuples(some.integers(0, 3), some.integers(0, 40), some.integers(-5, 45))


@given(
    some.lists(some.tuples(some.integers(0, 20), some.integers(0, 20), some.lists(pieces, max_size=6)), max_size=4),
    some.permutations([0, 1, 2, 3]),
)
def test_painting_is_what_it_says(rows, priority):
    flat = [(number, *piece) for number, row in enumerate(rows) for piece in row[2]]
    columns = [np.array([piece[at] for piece in flat], np.int64) for at in range(4)]
    begins, ends = [row[0] for row in rows], [row[0] + row[1] for row in rows]
    matrix = paint(begins, ends, spans=Spans(*columns), priority=tuple(priority), ground=0)
    expected = [
        painted_by_the_second(begin, end, row[2], priority, 0)
        for begin, end, row in zip(begins, ends, rows, strict=True)
    ]
    assert matrix.tolist() == expected
    assert unaccounted(matrix, np.array(ends, np.int64) - np.array(begins, np.int64)) == 0


def sample(second, what="step", **given):
    return {"index": 0, "time": second, "what": what} | given


def known(seconds, *, loses=False):
    column = {"start": us(0), "end": us(seconds)}
    labels = LABELS.index("start_up"), LABELS.index("recomputation")
    return Attempted(*(np.array([value]) for value in (*column.values(), *labels, loses)))


def test_a_journal_tells_steps_from_the_rest():
    progress = rows_of(
        "progress",
        sample(100, step=0, step_us=20 * 10**6),
        sample(200, step=5, step_us=20 * 10**6),
        sample(210, "validation_start"),
        sample(240, "validation_end"),
        sample(300, step=8, step_us=20 * 10**6),
    )
    ledger = journal_ledger(known(310), progress, incidents=rows_of("incidents"))[0]
    seconds = {label: value / 1e6 for label, value in zip(LABELS, ledger, strict=True) if value}
    assert seconds == {"start_up": 80, "kept_step": 180, "validation": 30, "unknown": 20}


def test_the_phases_of_an_incident_and_a_false_alarm():
    progress = rows_of("progress", *(sample(second, step=second) for second in range(10, 101, 10)))
    incident = {
        "index": 0,
        "onset": 41,
        "detected_us": 10**6,
        "decided_us": 3 * 10**6,
        "joined_us": 6 * 10**6,
        "first_valid_us": 8 * 10**6,
        "members_changed": 1,
    }
    alarm = {"index": 0, "onset": 71, "first_valid_us": 4 * 10**6, "members_changed": 0}
    ledger = journal_ledger(known(100), progress, incidents=rows_of("incidents", incident, alarm))[0]
    seconds = {label: value / 1e6 for label, value in zip(LABELS, ledger, strict=True) if value}
    assert seconds == {
        "start_up": 10,
        "kept_step": 78,
        "detection": 1,
        "diagnosis": 2,
        "replacement_start_up": 3,
        "recomputation": 2,
        "false_alarm": 4,
    }


def test_what_came_after_the_last_checkpoint_of_a_failed_attempt_is_lost():
    progress = rows_of(
        "progress", sample(10, step=0), sample(50, step=4), sample(60, "checkpoint", step=4), sample(90, step=8)
    )
    attempted = known(100, loses=True)
    ledger = journal_ledger(attempted, progress, incidents=rows_of("incidents"))[0]
    seconds = {label: value / 1e6 for label, value in zip(LABELS, ledger, strict=True) if value}
    assert seconds == {"start_up": 10, "kept_step": 50, "recomputation": 40}
    assert checkpoint_ages(attempted, progress).tolist() == [40 * 10**6]


def test_without_a_checkpoint_everything_since_the_first_step_is_lost():
    attempted = known(100, loses=True)
    progress = rows_of("progress", sample(10, step=0), sample(50, step=4))
    assert minutes(journal_ledger(attempted, progress, incidents=rows_of("incidents"))[0]) == {
        "start_up": 1 / 6,
        "recomputation": 1.5,
    }
    assert checkpoint_ages(attempted, progress).tolist() == [-1]


def test_steps_after_a_restored_checkpoint_are_lost():
    progress = rows_of(
        "progress",
        sample(10, step=0),
        sample(50, step=4),
        sample(90, step=8),
        sample(100, "restored", step=4),
        sample(140, step=8),
    )
    ledger = journal_ledger(known(140), progress, incidents=rows_of("incidents"))[0]
    seconds = {label: value / 1e6 for label, value in zip(LABELS, ledger, strict=True) if value}
    assert seconds == {"start_up": 10, "kept_step": 80, "recomputation": 50}


def test_standbys_hold_their_share_of_the_gpus():
    progress = rows_of("progress", sample(1, members=7, standbys=1, step=1), sample(2, members=8, standbys=0, step=2))
    assert standby_gpus(progress, np.array([16])).tolist() == [2]
    assert standby_gpus(rows_of("progress"), np.array([16])).tolist() == [0]


def test_every_label_has_a_priority():
    assert set(PRIORITY) == set(LABELS)
    assert set(LOSSES) < set(LABELS)


moments = some.integers(0, 400)
rows = some.tuples(
    some.integers(0, 2),
    some.sampled_from(
        ["step", "checkpoint", "validation_start", "validation_end", "compile_start", "started", "restored"]
    ),
    moments,
    some.one_of(some.none(), some.integers(0, 50)),
    some.one_of(some.none(), some.integers(0, 10**8)),
)
troubles = some.tuples(
    some.integers(0, 2), moments, *(some.one_of(some.none(), some.integers(0, 10**8)) for _ in range(4))
)


@given(
    some.lists(rows, max_size=25), some.lists(troubles, max_size=6), some.lists(some.booleans(), min_size=3, max_size=3)
)
def test_a_ledger_from_any_journal_adds_up(rows, troubles, loses):
    starts, ends = np.array([us(0), us(100), us(50)]), np.array([us(300), us(100), us(350)])
    label = np.full(3, LABELS.index("restart"))
    attempted = Attempted(starts, ends, label, label, np.array(loses))
    names = ("index", "what", "time", "step", "step_us")
    progress = rows_of("progress", *(dict(zip(names, row, strict=True)) for row in rows))
    names = ("index", "onset", "detected_us", "decided_us", "joined_us", "first_valid_us")
    incidents = rows_of("incidents", *(dict(zip(names, row, strict=True)) for row in troubles))
    ledger = journal_ledger(attempted, progress, incidents=incidents)
    assert unaccounted(ledger, ends - starts) == 0


def test_arrays_of_nothing():
    empty = attempts()
    assert assumed(empty, Assumptions()).shape == (0, len(LABELS))
    assert isinstance(rows_of("progress"), pa.Table)


def test_rows_that_cannot_be_counted_are_counted_as_such():
    columns = attempts(
        attempt(1, 0, 100),
        attempt(2, 0, 100, gpus=None),
        attempt(3, 0, 100, gpus=0),
        attempt(4, None, None),
        attempt(5, 100, 0),
    )
    assert (len(columns.run), columns.left_out, columns.turned) == (2, 2, 1)
    eternal = attempts(attempt(1, 0, 9e12, gpus=10**6), attempt(2, 0, 100, gpus=10**6))
    assert (len(eternal.run), eternal.left_out) == (1, 1)
    assert columns.length.tolist() == [100 * 10**6, 0]
