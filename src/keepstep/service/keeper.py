"""Keeps a journal without letting a full disk stop the training: what cannot be written is counted and told once."""

from __future__ import annotations

import logging

from keepstep.errors import StoreError
from keepstep.fleet.report import FOR_THE_REPORT
from keepstep.records.events import Event, StepProgress
from keepstep.store.journal import AnyJournal

__all__ = ["Keeper"]

_log = logging.getLogger(__name__)


class Keeper:
    """Appends to a journal. After the first failure nothing more is written, so that no gap is hidden.

    `events` are the records a report needs, kept in memory whatever the disk does; of the progress the newest.
    """

    def __init__(self, journal: AnyJournal) -> None:
        """`journal` is owned by the caller."""
        self.events: list[Event] = []
        self._journal = journal
        self._lost = 0

    def recall(self) -> list[Event]:
        """All records of the journal so far; those a report needs are known from now on. Raises RecordError."""
        whole = list(self._journal.replay())
        self.events = []
        for event in whole:
            self._remember(event)
        return whole

    def keep(self, event: Event, *, durable: bool = False) -> None:
        """Append one record, on the disk when it returns if `durable`."""
        self._remember(event)
        if self._lost:
            self._lost += 1
            return
        try:
            self._journal.append(event, durable=durable)
        except StoreError as error:
            self._lost += 1
            _log.error("%s -> training goes on, the journal ends here", error)

    def _remember(self, event: Event) -> None:
        """Keep `event` in memory if a report needs it. One of the progress takes the place of one right before it."""
        if not isinstance(event, FOR_THE_REPORT):
            return
        if self.events and isinstance(event, StepProgress) and isinstance(self.events[-1], StepProgress):
            self.events.pop()
        self.events.append(event)

    @property
    def problem(self) -> StoreError | None:
        """What to tell at the end if the journal is not whole."""
        if not self._lost:
            return None
        return StoreError(
            f"the last {self._lost} records are not in the journal",
            remedy="free space under the run directory; the training itself is whole",
        )
