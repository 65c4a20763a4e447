"""The member's machine at the commit of a move. Shows G-9 (deposed leaders) and G-10 (generations only grow)."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.member import LeaveJob, MemberState, Place, Refuse, RunOn, Say, TellSettled, obey, step_kept
from keepstep.control.member_moves import hand_over, may_take_over, must_wait, stay, take_over
from keepstep.records.messages import Abort, FirstStep, Go, Order, Parked, Settle
from keepstep.records.move_messages import MoveCommitted, MoveTaken, ReleaseMember

RUNNING = MemberState(rank=1, generation=3, epoch=1, version=7, fresh=False, whole=True)
LEFT, SAID = hand_over(RUNNING, 2, 4)


def at_boundary(state: MemberState, order: Order):
    return obey(state, order, place=Place.BOUNDARY)


def test_a_stayer_is_in_the_new_generation_without_a_word():
    state = stay(RUNNING, 4)
    assert (state.generation, state.version, must_wait(state)) == (4, 7, False)
    assert step_kept(state)[1] is None


def test_a_leaver_says_so_and_waits_for_its_release():
    assert Say(MoveCommitted(2, 4, 7)) == SAID
    assert must_wait(LEFT) and LEFT.generation == 3
    assert at_boundary(LEFT, ReleaseMember(1, 2, "done"))[1] == LeaveJob(0, "done")


def test_nobody_else_is_released():
    for state, order in ((RUNNING, ReleaseMember(1, 2, "")), (LEFT, ReleaseMember(1, 1, ""))):
        assert isinstance(at_boundary(state, order)[1], Refuse)
    assert isinstance(at_boundary(LEFT, ReleaseMember(0, 2, ""))[1], Refuse), "a deposed leader's"


def test_a_leaver_that_gets_its_rank_back_goes_on():
    state, act = at_boundary(LEFT, Abort(1, 5, (1,), renew=True))
    assert act == Say(Parked(5, 7, agreed=False, boundary=True))
    state, act = at_boundary(state, Settle(1, 5, 7))
    assert act == TellSettled(5, 7) and must_wait(state)
    state, act = at_boundary(state, Go(1, 5, 7, {}))
    assert isinstance(act, RunOn) and not must_wait(state) and state.generation == 5


def test_a_joiner_without_state_says_so():
    joiner = MemberState(rank=1, generation=3, epoch=1, joiner=True, answering=3)
    assert may_take_over(joiner)
    state, act = at_boundary(joiner, Abort(1, 5, (0,), renew=True))
    assert act == Say(Parked(5, -1, agreed=False, boundary=True))
    assert not may_take_over(state), "its leaver may have its rank back by now"


def test_a_joiner_takes_over_and_reports_its_first_step():
    joiner = MemberState(rank=1, generation=3, epoch=1, joiner=True, answering=3)
    state, act = take_over(joiner, MoveTaken(2, 7), 4)
    assert act == Say(MoveTaken(2, 7)) and not must_wait(state) and not state.joiner
    state, act = step_kept(state)
    assert act == Say(FirstStep(4, 8))


@given(st.lists(st.sampled_from(["kept", "stay", "abort", "settle", "go"]), max_size=30))
def test_generations_only_grow(events):
    state = RUNNING
    for event in events:
        before = state
        top = max(state.generation, state.answering)
        if event == "kept" and not must_wait(state):
            state, _ = step_kept(state)
        elif event == "stay" and not must_wait(state):
            state = stay(state, top + 1)
        elif event == "abort":
            state, _ = at_boundary(state, Abort(1, top + 1, (0,)))
        elif event == "settle":
            state, _ = at_boundary(state, Settle(1, top, state.version))
        elif event == "go":
            state, _ = at_boundary(state, Go(1, top, state.version, {}))
        assert state.generation >= before.generation and state.version >= before.version
        assert msgspec.structs.replace(state, epoch=1) == state
