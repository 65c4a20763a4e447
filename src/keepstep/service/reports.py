"""Reports of runs read back from their directories, also while they are going on or after they were cut off."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.fleet.report import report_text, summarise
from keepstep.service.run_directory import is_running, read_run
from keepstep.store.journal import read_journal

__all__ = ["report_of"]


def report_of(directory: Path, *, json: bool) -> str:
    """The report of the run in `directory` as text or JSON. Raises UsageError where there is no run."""
    read_run(directory)
    running = is_running(directory)  # asked first: a job that ends now has its end in the journal
    events, _ = read_journal(directory)
    report = summarise(events, running=running)
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() if json else report_text(report)
