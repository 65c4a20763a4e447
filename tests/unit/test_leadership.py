"""G-9: a deposed controller cannot decide any more: its appends fail, and the next one's epoch is higher."""

from __future__ import annotations

import msgspec
import pytest
from test_job_shell import SPEC, StandingClock

from keepstep.control.job import new_job
from keepstep.errors import EnvironmentProblem, StaleEpoch
from keepstep.service.leadership import Leadership
from keepstep.store.state_store import MemoryStateStore


def test_epochs_grow_and_the_deposed_one_fails() -> None:
    store, clock = MemoryStateStore(), StandingClock()
    first = Leadership(store, "j", holder="a", clock=clock)
    state = new_job(SPEC, first.epoch)
    first.note(state)
    with pytest.raises(EnvironmentProblem, match="another controller leads"):
        Leadership(store, "j", holder="b", clock=clock)
    clock.now += 60
    second = Leadership(store, "j", holder="b", clock=clock)
    assert second.epoch > first.epoch
    with pytest.raises(StaleEpoch):
        first.note(msgspec.structs.replace(state, attempt=1))


def test_only_changes_are_noted_and_a_held_lease_stays() -> None:
    store, clock = MemoryStateStore(), StandingClock()
    right = Leadership(store, "j", holder="a", clock=clock)
    state = new_job(SPEC, right.epoch)
    for _ in range(3):
        right.note(state)
    right.note(msgspec.structs.replace(state, generation=1))
    assert [entry.index for entry in store.read("job/j/")] == [0, 1]
    for _ in range(10):
        clock.now += 6
        right.renew()
    assert store.lead("b", clock.now, ttl_s=1.0).holder == "a"
