"""What becomes of a step: kept, done again, or the user's own error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from keepstep.control.member import MemberState
from keepstep.training.guard import StepAborted
from keepstep.training.joining import Membership
from keepstep.training.step import Step
from keepstep.training.user_job import Job


class GuardTwin:
    """Answers like a guard whose agreement passes (`passes`) or does not, and notes what was asked of it."""

    def __init__(self, *, passes: bool, poisoned: bool = False) -> None:
        self.passes = passes
        self.poisoned = poisoned
        self.agreed = False
        self.aborted = False
        self.told: list[str] = []

    def agree(self) -> None:
        self.told.append("agree")
        if not self.passes:
            raise StepAborted
        self.agreed = True

    def redo(self) -> None:
        self.told.append("redo")

    def drop_rest(self) -> None:
        self.told.append("drop rest")

    def kept(self) -> None:
        self.told.append("kept")

    def poisoned_and_undecided(self) -> bool:
        return self.poisoned and not self.agreed

    def resolve_aborted(self) -> None:
        self.told.append("resolve")


def test_an_agreed_step_is_kept():
    """G-1"""
    guard = GuardTwin(passes=True)
    step = Step(guard, 4)
    with step:
        guard.agree()
    assert step.kept
    assert guard.told == ["agree", "kept"]


def test_a_refused_step_ends_quietly_and_is_done_again():
    """G-1: what follows the refused agreement in the body does not run."""
    guard = GuardTwin(passes=False)
    step = Step(guard, 4)
    after = []
    with step:
        guard.agree()
        after.append("update")
    assert after == []
    assert not step.kept
    assert guard.told == ["agree", "redo"]


def test_an_exception_in_an_aborted_step_is_discarded_with_it():
    """G-5"""
    guard = GuardTwin(passes=False, poisoned=True)
    step = Step(guard, 4)
    with step:
        raise FloatingPointError("loss is NaN")
    assert not step.kept
    assert guard.told == ["resolve", "redo"]


def test_an_exception_in_a_healthy_step_is_the_users():
    """G-6"""
    guard = GuardTwin(passes=True)
    with pytest.raises(FloatingPointError, match="NaN"), Step(guard, 4):
        raise FloatingPointError("loss is NaN")
    assert guard.told == []


def test_an_interrupt_is_never_discarded():
    guard = GuardTwin(passes=False, poisoned=True)
    with pytest.raises(KeyboardInterrupt), Step(guard, 4):
        raise KeyboardInterrupt
    assert guard.told == []


def test_the_update_of_an_agreed_step_counts_whatever_comes_after_it():
    """G-1: once agreed, a loss in what follows the update does not take the step back; no gradient is left over."""
    guard = GuardTwin(passes=True, poisoned=True)
    step = Step(guard, 4)
    with step:
        guard.agree()
        raise ValueError("a metric of unspecified data")
    assert step.kept
    assert guard.told == ["agree", "drop rest", "kept"]


def test_an_unprotected_step_lets_everything_through():
    with pytest.raises(ValueError, match="own"), Step(None, 0):
        raise ValueError("own")
    with Step(None, 1) as step:
        pass
    assert step.kept


class JoinerTwin(GuardTwin):
    """The guard of a joiner that rehearses one step before it takes the state of version 7."""

    def __init__(self) -> None:
        super().__init__(passes=False)
        self.rehearsing = True
        self.state = MemberState(rank=0, generation=1, epoch=1, version=7, joiner=True)

    def begin_step(self) -> None:
        """Nothing is kept for a redo."""

    def boundary(self, *, last: bool) -> None:
        self.told.append("boundary")


def test_the_step_that_a_joiner_rehearses_is_made_in_full_and_does_not_count():
    """With several optimizers nothing is agreed before its end: what is to be written belongs under `if step.kept`."""
    job = Job(Membership(rank=0, world=2, attempt=0, guard=JoinerTwin()))
    job._tracked = SimpleNamespace(gradient_buckets=SimpleNamespace(alone=False))
    steps = job.steps(total=9)
    ran = []
    with next(steps) as rehearsed:
        ran.append("behind optimizer.step()")
    assert ran and not rehearsed.kept and not job.rehearsing
    assert next(steps).number == 7
