"""Whose problem an exit is: the machine's, the user's, or nobody's."""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = ["SELF_INFLICTED", "ExitKind", "PastFailure", "classify_exit", "exit_code_of"]

SELF_INFLICTED = frozenset({4, 5, 6, 7, 8, 11, 31})
"""Signals a program sends to itself by its own fault: ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS."""


class ExitKind(Enum):
    """What an exit means for the job."""

    DONE = "done"
    USER_ERROR = "user_error"
    FAULT = "fault"


class PastFailure(msgspec.Struct, frozen=True):
    """A loss that was already repaired: `rank` died of `signal` when the job stood at `version`."""

    rank: int
    signal: int
    version: int


def exit_code_of(code: int, signal: int) -> int:
    """The shell's exit code for a process: its own, or 128 + signal."""
    return 128 + signal if signal else code


def classify_exit(*, rank: int, code: int, signal: int, version: int, past: tuple[PastFailure, ...]) -> ExitKind:
    """Judge the exit of the member of `rank` while the job stood at `version` (steps kept).

    An exit code other than 0 is the user's own (an exception, `sys.exit(3)`). A signal is a fault, unless the same
    rank died the same way at the same step before: once before for signals a program inflicts on itself, twice before
    for others (SIGKILL may hit a rank and its replacement by chance, a third time it is the program).
    """
    if not signal:
        return ExitKind.DONE if code == 0 else ExitKind.USER_ERROR
    again = sum(1 for f in past if (f.rank, f.signal, f.version) == (rank, signal, version))
    allowed = 1 if signal in SELF_INFLICTED else 2
    return ExitKind.USER_ERROR if again >= allowed else ExitKind.FAULT
