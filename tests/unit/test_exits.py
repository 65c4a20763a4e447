"""Whose problem an exit is. Shows G-6: user errors swap nothing, and a fault that repeats is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.exits import SELF_INFLICTED, ExitKind, PastFailure, classify_exit, exit_code_of, repeats


@pytest.mark.parametrize(
    ("code", "signal", "kind", "shell"),
    [
        (0, 0, ExitKind.DONE, 0),
        (1, 0, ExitKind.USER_ERROR, 1),
        (75, 0, ExitKind.USER_ERROR, 75),
        (-2, 2, ExitKind.USER_ERROR, 130),
        (-9, 9, ExitKind.FAULT, 137),
        (-11, 11, ExitKind.FAULT, 139),
    ],
)
def test_one_exit(code, signal, kind, shell):
    assert classify_exit(code, signal) is kind
    assert exit_code_of(code, signal) == shell


@given(st.integers(1, 31), st.integers(0, 7), st.integers(0, 100), st.integers(0, 4))
def test_a_failure_repeats_after_one_or_two(signal, rank, version, before):
    failure = PastFailure(rank, signal, -signal, version)
    assert repeats(failure, (failure,) * before) == (before >= (1 if signal in SELF_INFLICTED else 2))


def test_a_joiner_may_fail_by_chance_whatever_the_signal():
    failure = PastFailure(1, 11, -11, 4, joining=True)
    assert not repeats(failure, (failure, PastFailure(1, 11, -11, 4)))
    assert repeats(failure, (failure, failure))


def test_only_the_same_failure_counts():
    failure = PastFailure(1, 11, -11, 4)
    others = (PastFailure(0, 11, -11, 4), PastFailure(1, 9, -9, 4), PastFailure(1, 11, -11, 5), PastFailure(1, 0, 1, 4))
    assert not repeats(failure, others)
    assert repeats(failure, (*others, failure))
