"""Whose problem an exit is: the machine's, the user's, or nobody's."""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = ["SELF_INFLICTED", "ExitKind", "PastFailure", "classify_exit", "exit_code_of", "repeats"]

SELF_INFLICTED = frozenset({4, 5, 6, 7, 8, 11, 31})
"""Signals a program sends to itself by its own fault: ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS."""

_SIGINT = 2


class ExitKind(Enum):
    """What an exit means for the job."""

    DONE = "done"
    USER_ERROR = "user_error"
    FAULT = "fault"


class PastFailure(msgspec.Struct, frozen=True):
    """`rank` ended by `signal` (0: by itself, with `code`) when the job stood at `version` (steps kept).

    `joining` says that the process was taking the rank's place and had not made a step in it yet.
    """

    rank: int
    signal: int
    code: int
    version: int
    joining: bool = False


def exit_code_of(code: int, signal: int) -> int:
    """The shell's exit code for a process: its own, or 128 + signal."""
    return 128 + signal if signal else code


def classify_exit(code: int, signal: int) -> ExitKind:
    """Judge one exit by itself: a signal is a fault, another code than 0 is the user's own (exception, `sys.exit(3)`).
    SIGINT is a person's wish to stop, also where it reaches a single rank.

    What a single exit cannot tell, `repeats` does: a fault that comes again at the same step is the user's too.
    """
    if signal and signal != _SIGINT:
        return ExitKind.FAULT
    return ExitKind.DONE if code == 0 and not signal else ExitKind.USER_ERROR


def repeats(failure: PastFailure, past: tuple[PastFailure, ...]) -> bool:
    """True if this failure is the program's own: the same rank ended the same way at the same step before.

    Once before is enough for signals that a program inflicts on itself in a step; otherwise (SIGKILL, a freeze, a
    joiner) a rank and its replacement may be hit by chance, and only the third time it is the program.
    """
    again = sum(1 for earlier in past if earlier == failure)
    return again >= (1 if failure.signal in SELF_INFLICTED and not failure.joining else 2)
