"""The member's machine. Shows G-1 (all or none), G-9 (deposed leaders) and G-10 (older generations)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.member import (
    LeaveJob,
    ListCheckpoints,
    LoadCheckpoint,
    MemberState,
    Place,
    Refuse,
    Resolve,
    RunOn,
    Say,
    TakeState,
    TellSettled,
    at_boundary,
    obey,
    step_kept,
)
from keepstep.records.messages import (
    Abort,
    Fence,
    Fetch,
    Find,
    FirstStep,
    Go,
    Parked,
    Ready,
    Restore,
    Settle,
    Stop,
    Welcome,
)

AT, BETWEEN = Place.AGREEMENT, Place.BOUNDARY
RUNNING = MemberState(rank=1, generation=3, epoch=1, version=7, fresh=False, whole=True)
orders = st.one_of(
    st.builds(Abort, epoch=st.integers(0, 3), generation=st.integers(0, 8), lost=st.just((2,))),
    st.builds(Settle, epoch=st.integers(0, 3), generation=st.integers(0, 8), version=st.integers(5, 9)),
    st.builds(Find, epoch=st.integers(0, 3), generation=st.integers(0, 8)),
    st.builds(Restore, epoch=st.integers(0, 3), generation=st.integers(0, 8), version=st.integers(-1, 9)),
    st.builds(Go, epoch=st.integers(0, 3), generation=st.integers(0, 8), version=st.integers(0, 9), roster=st.just({})),
    st.builds(Stop, epoch=st.integers(0, 3), code=st.integers(0, 3), why=st.just("over")),
)


def parked(place: Place = AT) -> MemberState:
    state, _ = obey(RUNNING, Abort(1, 4, (2,)), place=place)
    return state


@pytest.mark.parametrize("place", [AT, BETWEEN])
def test_an_abort_is_answered_with_where_one_stands(place):
    state, act = obey(RUNNING, Abort(1, 4, (2,)), place=place)
    assert act == Say(Parked(4, 7, agreed=False, boundary=place is BETWEEN))
    assert (state.generation, state.answering) == (3, 4)


def test_a_step_that_some_saw_agreed_rolls_forward():
    state, act = obey(parked(), Settle(1, 4, 8), place=AT)
    assert act == Resolve(forward=True)
    state, act = step_kept(state)
    assert act is None
    assert at_boundary(state) == (msgspec.structs.replace(state, target=None), TellSettled(4, 8))


def test_a_step_that_nobody_saw_agreed_is_redone():
    state, act = obey(parked(), Settle(1, 4, 7), place=AT)
    assert act == Resolve(forward=False)
    assert at_boundary(state)[1] == TellSettled(4, 7)


def test_between_steps_one_has_settled_at_once_and_cannot_go_further():
    assert obey(parked(BETWEEN), Settle(1, 4, 7), place=BETWEEN)[1] == TellSettled(4, 7)
    for version in (6, 8):
        assert isinstance(obey(parked(BETWEEN), Settle(1, 4, version), place=BETWEEN)[1], Refuse)


@pytest.mark.parametrize(("generation", "version"), [(3, 7), (4, 6), (4, 9), (5, 8)])
def test_a_settle_that_does_not_fit_is_refused(generation, version):
    state = parked()
    assert isinstance(obey(state, Settle(1, generation, version), place=AT)[1], Refuse)


def test_a_second_abort_takes_the_place_of_the_first():
    state, _ = obey(parked(), Settle(1, 4, 8), place=AT)
    state, _ = step_kept(state)
    state, act = obey(state, Abort(1, 5, (0, 2)), place=BETWEEN)
    assert act == Say(Parked(5, 8, agreed=False, boundary=True))
    assert at_boundary(state)[1] is None


def test_a_member_in_its_set_up_holds_no_state():
    fresh = MemberState(rank=1, generation=0)
    state, act = obey(fresh, Abort(1, 1, (2,)), place=BETWEEN)
    assert act == Say(Parked(1, -1, agreed=False, boundary=True))
    assert obey(fresh, Abort(1, 1, (2,)), place=AT)[1] == Say(Parked(1, 0, agreed=False, boundary=False))


def test_a_joiner_is_ready_once_takes_state_and_runs_on():
    state, act = at_boundary(MemberState(rank=2, generation=4, joiner=True))
    assert act == Say(Ready(4, replica=""))
    assert at_boundary(state)[1] is None
    fetch = Fetch(1, 5, 7, "d", (0,), {}, b"")
    assert obey(state, fetch, place=BETWEEN)[1] == TakeState(fetch)
    go = Go(1, 5, 7, {})
    state, act = obey(state, go, place=BETWEEN)
    assert act == RunOn(go)
    assert (state.generation, state.version, state.joiner, state.answering) == (5, 7, False, -1)
    state, act = step_kept(state)
    assert act == Say(FirstStep(5, 8))
    assert step_kept(state)[1] is None


def test_checkpoints_are_listed_and_loaded():
    state, act = obey(RUNNING, Find(1, 4), place=BETWEEN)
    assert act == ListCheckpoints(4)
    state, act = obey(state, Restore(1, 4, 5), place=BETWEEN)
    assert (act, state.version) == (LoadCheckpoint(4, 5), 5)
    state, act = obey(state, Restore(1, 4, -1), place=BETWEEN)
    assert (act, state.version) == (LoadCheckpoint(4, -1), 0)


@pytest.mark.parametrize("order", [Find(1, 4), Restore(1, 4, 5), Go(1, 4, 7, {})])
def test_at_an_agreement_only_a_verdict_counts(order):
    assert isinstance(obey(parked(), order, place=AT)[1], Refuse)


def test_a_second_welcome_is_refused():
    welcome = Welcome(1, 1, 4, 0, 4, 0, joiner=False, roster={}, secret=b"")
    assert isinstance(obey(RUNNING, welcome, place=BETWEEN)[1], Refuse)


@pytest.mark.parametrize(("order", "code"), [(Fence(1, "gone"), 76), (Stop(1, 3, "over"), 3)])
@pytest.mark.parametrize("place", [AT, BETWEEN])
def test_who_is_told_to_go_goes(order, code, place):
    assert obey(RUNNING, order, place=place)[1] == LeaveJob(code, order.why)


@given(st.lists(st.tuples(orders, st.sampled_from(Place)), max_size=20))
def test_deposed_leaders_and_older_generations_change_nothing(letters):
    """G-9, G-10: epoch and generation only grow, and what is below them is refused without any effect."""
    state = RUNNING
    for order, place in letters:
        after, act = obey(state, order, place=place)
        assert after.epoch >= state.epoch and after.generation >= state.generation
        if order.epoch < state.epoch:
            assert after == state and isinstance(act, Refuse)
        elif getattr(order, "generation", 99) < max(state.generation, state.answering):
            assert isinstance(act, Refuse)
            assert after == msgspec.structs.replace(state, epoch=order.epoch)
        state = after
