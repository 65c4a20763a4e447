"""The account of a fleet: any division into parts gives the same, and it adds up with journals and without."""

from __future__ import annotations

import numpy as np
import pytest
from fleet_rows import attempt, joined, rows_of
from hypothesis import given, settings
from hypothesis import strategies as some

from keepstep.fleet.account import Account, Known, account_of, joined_accounts, ledger_totals
from keepstep.fleet.attempt_arrays import arrays_of, exact_sum
from keepstep.fleet.ledger import Assumptions

HOUR = 3600
ENDS = ("completed", "node_fail", "user", "preempted", "cancelled", "running")
lives = some.tuples(
    some.integers(0, 10**6),
    some.integers(0, 10**6),
    some.sampled_from(ENDS),
    some.integers(0, 5),
    some.sampled_from([1, 8, 4096]),
)


def rows(lives):
    return [
        attempt(
            number, start, None if how == "running" else start + length, how=how, run_id=run, gpus=gpus, life=number
        )
        for number, (start, length, how, run, gpus) in enumerate(lives)
    ]


def known(*progress, incidents=()):
    return Known(
        rows_of("progress", *progress, extra=("attempt_id",)), rows_of("incidents", *incidents, extra=("attempt_id",))
    )


def of(rows, **given):
    return account_of(arrays_of(joined(*rows)), Assumptions(), **given)


def same(one: Account, other: Account) -> bool:
    columns = ("kept", "lost", "losses", "journaled", "age")
    arrays = ("attempt", "run", "start", "end", "gpus", "infrastructure", "victim_of")
    names = [[coded[1][code] for code in coded[0]] for coded in (one.attempts.ending, other.attempts.ending)]
    return (
        one.by_size == other.by_size
        and one.off == other.off
        and names[0] == names[1]
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
        and all(np.array_equal(getattr(one.attempts, name), getattr(other.attempts, name)) for name in arrays)
    )


@settings(deadline=None)
@given(some.lists(lives, max_size=20), some.integers(1, 4))
def test_any_division_into_parts_gives_the_same(lives, parts):
    every = rows(lives)
    divided = [of([row for row in every if row["run_id"] % parts == part]) for part in range(parts)]
    whole = of(every)
    assert same(joined_accounts(divided), joined_accounts([whole]))
    assert whole.off == 0
    allocated = exact_sum(whole.attempts.length * whole.attempts.gpus)
    assert sum(ledger_totals(whole).values()) == allocated


def test_sums_by_size_add_up_to_the_whole():
    found = of(rows([(0, HOUR, "completed", 0, 8), (0, HOUR, "node_fail", 1, 16)]))
    parts = [ledger_totals(found, size=size) for size in (0, 1)]
    assert sum(parts[0].values()) == 8 * HOUR * 10**6
    assert {label: sum(part[label] for part in parts) for label in parts[0]} == ledger_totals(found)


def sample(second, what="step", **given):
    return {"attempt_id": 1, "time": second, "what": what} | given


def test_a_journal_replaces_the_assumptions_and_standbys_have_their_share():
    found = of(
        [attempt(1, 0, HOUR, gpus=9), attempt(2, 0, HOUR, gpus=9)],
        known=known(sample(600, step=0, members=8, standbys=1), sample(HOUR, step=100, members=8, standbys=1)),
    )
    assert found.journaled.tolist() == [True, False]
    totals = {label: value / 6e7 for label, value in ledger_totals(found).items() if value}
    assert totals == {"kept_step": 50 * 8 + 55 * 9, "start_up": 10 * 8 + 5 * 9, "standby": 60}
    assert found.off == 0


def test_incidents_without_samples_of_steps_come_out_of_kept_time():
    incident = {
        "attempt_id": 1,
        "onset": 1800,
        "detected_us": 10**7,
        "decided_us": 2 * 10**7,
        "joined_us": 5 * 10**7,
        "first_valid_us": 6 * 10**7,
        "members_changed": 1,
    }
    found = of([attempt(1, 0, HOUR, gpus=1)], known=known(incidents=(incident,)))
    seconds = {label: value / 1e6 for label, value in ledger_totals(found).items() if value}
    assert seconds == {
        "kept_step": 3240,
        "start_up": 300,
        "detection": 10,
        "diagnosis": 10,
        "replacement_start_up": 30,
        "recomputation": 10,
    }


def test_the_true_age_of_a_checkpoint_is_used_where_it_is_known():
    found = of([attempt(1, 0, 2 * HOUR, how="node_fail", gpus=1)], known=known(sample(2 * HOUR - 60, "checkpoint")))
    assert found.age.tolist() == [60 * 10**6]
    assert found.lost.tolist() == [60 * 10**6]
    assert ledger_totals(found)["recomputation"] == 60 * 10**6


def test_rows_of_attempts_that_are_not_here_are_no_matter():
    stray = sample(10, step=1) | {"attempt_id": 77}
    assert of([attempt(1, 0, HOUR)], known=known(stray)).journaled.tolist() == [False]
    assert of([], known=known(stray)).off == 0


def test_groups_may_be_any_column():
    table = joined(attempt(1, 0, HOUR, partition="small"))
    assert arrays_of(table, group="partition").group[1] == ("small",)
    assert sum(ledger_totals(of([])).values()) == pytest.approx(0)
