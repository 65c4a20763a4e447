"""Where a trial writes down what its rank does, and how it knows which line of the script did it."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType

from keepstep.records.trial import SiteSeen, TrialRecord, encode_record
from keepstep.training.script_frames import above_library, of_script, script_frame

__all__ = ["MOST_RECORDS", "TrialNotes"]

MOST_RECORDS = 200_000
"""A trial keeps so many records; what comes after them is not looked at."""

_write = os.write  # as it was before any script could change it


class TrialNotes:
    """Appends records to an open file, each in one write. `step` is the step that calls carry."""

    def __init__(self, descriptor: int) -> None:
        self.step = -1
        self.records = 0
        self.full = False
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._sites: dict[tuple[CodeType, int], int] = {}
        self._places: list[str] = []
        self._main = threading.main_thread().ident

    def keep(self, record: TrialRecord) -> None:
        """Write `record`, unless there are too many."""
        with self._lock:
            self.records += 1
            self.full = self.records > MOST_RECORDS
        if not self.full:
            self.keep_always(record)

    def keep_always(self, record: TrialRecord) -> None:
        """Write `record`; a child of the script writes nothing."""
        data = encode_record(record) if os.getpid() == self._pid else b""
        while data:
            data = data[_write(self._descriptor, data) :]

    def site(self, frame: FrameType | None = None) -> int:
        """The number of the innermost line of the script above the caller, -1 if there is none. In a thread that runs
        nothing of the script (autograd's) it is the line the main thread stands at."""
        found = script_frame(frame or sys._getframe(1))
        if found is None and self._main is not None and threading.get_ident() != self._main:
            found = script_frame(sys._current_frames().get(self._main))
        if found is None:
            return -1
        return self._number(found.f_code, found.f_lineno)

    def at(self, frame: FrameType, line: int) -> int:
        """The number of `line` in `frame`, -1 where that is not the script's."""
        return self._number(frame.f_code, line) if of_script(frame.f_code) else -1

    def direct(self) -> int:
        """As `site`, but -1 if something else than Python's own library stands between that line and the caller."""
        frame = above_library(sys._getframe(2))
        return self.site(frame) if frame is not None and of_script(frame.f_code) else -1

    def place(self, number: int) -> str:
        """`file:line` of a site; empty for -1."""
        return self._places[number] if number >= 0 else ""

    def inside(self, word: str) -> bool:
        """Whether a function of torch with `word` in its name called the caller."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not of_script(frame.f_code):
            if word in frame.f_code.co_name:
                return True
            frame = frame.f_back
        return False

    def _number(self, code: CodeType, line: int) -> int:
        key = (code, line)
        with self._lock:
            number = self._sites.get(key)
            if number is not None:
                return number
            file = _shown(code.co_filename)
            number = self._sites[key] = len(self._sites)
            self._places.append(f"{file}:{line}")
        self.keep_always(SiteSeen(number, file, line, code.co_name))
        return number


def _shown(file: str) -> str:
    """`file` as a person would type it here."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
