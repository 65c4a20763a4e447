"""Keeps a journal without letting a full disk stop the training: what cannot be written is counted and told once."""

from __future__ import annotations

import logging

from keepstep.errors import StoreError
from keepstep.records.events import DrillRecord, Event, Finding, Incident, JobEnded, JobStarted
from keepstep.store.journal import AnyJournal

__all__ = ["Keeper"]

_log = logging.getLogger(__name__)
_FOR_THE_REPORT = (JobStarted, JobEnded, Finding, Incident, DrillRecord)


class Keeper:
    """Appends to a journal; after the first failure nothing more is written (no gap is hidden) but all is kept in
    memory for the report. `lost` counts the records that are not on disk."""

    def __init__(self, journal: AnyJournal) -> None:
        """`journal` is owned by the caller."""
        self.lost = 0
        self.events: list[Event] = []
        self._journal = journal

    def keep(self, event: Event, *, durable: bool = False) -> None:
        """Append one record, on the disk when it returns if `durable`."""
        if isinstance(event, _FOR_THE_REPORT):
            self.events.append(event)
        if self.lost:
            self.lost += 1
            return
        try:
            self._journal.append(event, durable=durable)
        except StoreError as error:
            self.lost += 1
            _log.error("%s -> training goes on, the journal ends here", error)
