"""What the training loop does outside collectives, told to the recorder: steps, waits for data, saves, the set-up."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from keepstep.records.ring import SpanKind

__all__ = ["NO_SPANS", "SpanRecorder", "Spans"]


class SpanRecorder(Protocol):
    """Where spans go; the fabric is one."""

    def span_begin(self, what: SpanKind) -> int:
        """`what` begins; the result is for `span_end`."""

    def span_end(self, mark: int) -> None:
        """It ended."""


class _Open:
    """One span as a context manager; it ends however its block does."""

    __slots__ = ("_mark", "_recorder", "_what")

    def __init__(self, recorder: SpanRecorder | None, what: SpanKind) -> None:
        self._recorder = recorder
        self._what = what
        self._mark = 0

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._mark = self._recorder.span_begin(self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.span_end(self._mark)


class Spans:
    """The spans of one process. Without a recorder it costs nothing and tells nobody."""

    def __init__(self, recorder: SpanRecorder | None = None) -> None:
        self._recorder = recorder
        self._marks: dict[SpanKind, int] = {}

    def span(self, what: SpanKind) -> _Open:
        """A context manager around `what`."""
        return _Open(self._recorder, what)

    def begin(self, what: SpanKind) -> None:
        """`what` begins where no block encloses it; one that is still open ends first."""
        if self._recorder is not None:
            self.end(what)
            self._marks[what] = self._recorder.span_begin(what)

    def end(self, what: SpanKind) -> None:
        """`what` ends, if it was begun."""
        if self._recorder is not None:
            self._recorder.span_end(self._marks.pop(what, 0))


NO_SPANS = Spans()
"""For processes without a recorder."""
