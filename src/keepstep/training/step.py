"""One step as the user sees it: a context manager whose body counts as a whole or is done again."""

from __future__ import annotations

import logging
from types import TracebackType

from keepstep.training.guard import Guard, StepAborted

__all__ = ["Step"]

_log = logging.getLogger("keepstep")


class Step:
    """`with step:` holds exactly one optimizer update. `number` counts from 0; `kept` is true once it counts.

    `entered` says that its block was begun.
    """

    def __init__(self, guard: Guard | None, number: int) -> None:
        self.number = number
        self.kept = False
        self.entered = False
        self._guard = guard

    def __index__(self) -> int:
        return self.number

    def __enter__(self) -> Step:
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._guard is None:
            self.kept = error is None
            return False
        return self._leave(self._guard, error)

    def _leave(self, guard: Guard, error: BaseException | None) -> bool:
        try:
            if isinstance(error, StepAborted) or (error is None and guard.aborted):
                raise StepAborted
            if error is None:
                if not guard.agreed:
                    guard.agree()
            elif not isinstance(error, Exception):
                return False
            elif guard.poisoned_and_undecided():
                _log.info("step %d was aborted; its %s is discarded", self.number, type(error).__name__)
                guard.resolve_aborted()
                raise StepAborted
            elif guard.poisoned:
                _log.warning("after the update of step %d: %s: %s", self.number, type(error).__name__, error)
                guard.drop_rest()
            else:
                return False
        except StepAborted:
            guard.redo()
            return True
        guard.kept()
        self.kept = True
        return True
