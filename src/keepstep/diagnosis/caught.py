"""Errors that a program caught: training went on after them, and nothing failed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from keepstep.diagnosis.log_case import LogCase, is_claim
from keepstep.records.evidence import MAY_BE_CAUGHT, LogEvent

__all__ = ["FAILURES", "Caught"]

FAILURES = (
    "watchdog_timeout",
    "first_failure",
    "crashed",
    "teardown",
    "nccl_error",
    "gloo_timeout",
    "store_timeout",
)
"""Kinds of events that say that processes of the job failed."""
_CLOSED = "peer_closed"
_STEPS = 5
"""Steps after an error, in a job whose ranks wait for each other: no rank has ended with it."""


class Caught:
    """Which errors of a job were caught: training went on for some steps, or to its end, and no process failed."""

    def __init__(self, case: LogCase) -> None:
        """Looks at all lines of progress once."""
        self._case = case
        self._steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for item in case.of("step_progress", "step_after_error", claims=False):
            if item.fields.get("step", "").isdigit():
                self._steps[item.path].append((item.line, int(item.fields["step"])))
        for steps in self._steps.values():
            steps.sort()
        self._ended: dict[str, int] = {}
        for item in case.of("training_ended", claims=False):
            self._ended[item.path] = max(self._ended.get(item.path, 0), item.line)
        self._failed = case.has(*FAILURES, claims=False) or any(
            event.fields.get("code", "1") != "0" for event in case.of("process_ended", claims=False)
        )
        self._closed = case.has(_CLOSED, claims=False)

    def __contains__(self, event: LogEvent) -> bool:
        """Whether training went on after the error. Where it began again from an earlier step, it did not."""
        if event.kind not in MAY_BE_CAUGHT or is_claim(event) or self._failed:
            return False
        if self._closed and event.kind != _CLOSED:
            return False
        ended = self._ended.get(event.path, 0) > event.line
        steps = self._steps.get(event.path, [])
        later = steps[bisect_right(steps, (event.line, -1)) :][:1]
        if not later:
            return ended
        (_, first), (_, newest) = later[0], steps[-1]
        told = event.fields.get("after_step", "")
        before = int(told) if told.isdigit() else first
        return first >= before and (ended or newest - before >= _STEPS)

    def errors(self) -> list[LogEvent]:
        """All of them, in the order of the logs."""
        return [event for event in self._case.of(*MAY_BE_CAUGHT, claims=False) if event in self]
