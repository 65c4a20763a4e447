"""Which step every rank is in, as agents on other nodes report it."""

from __future__ import annotations

from keepstep.control.job_state import JobState
from keepstep.records.messages import Fact
from keepstep.records.watch_messages import Watched

__all__ = ["ReportedSteps"]


class ReportedSteps:
    """The steps of one job. A report of an older generation, or from before a restart, says nothing any more."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._attempt = 0
        self._steps: dict[int, int] = {}

    def take(self, fact: Fact, state: JobState) -> None:
        """Look at a fact that reaches the job in `state`."""
        if state.attempt != self._attempt:
            self._attempt, self._steps = state.attempt, {}
        if not isinstance(fact, Watched):
            return
        over = [(window.rank, window.generation, window.last_step + 1) for window in fact.report.windows]
        now = [(progress.rank, progress.generation, progress.step) for progress in fact.report.progress]
        self._steps.update({rank: step for rank, generation, step in over + now if generation >= state.generation})

    def steps(self) -> dict[int, int]:
        """The step of every rank that a report told of."""
        return dict(self._steps)
