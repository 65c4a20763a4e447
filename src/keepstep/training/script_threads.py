"""Threads that a script starts in a rehearsal: none may be at work when the rehearsal is over.

What it would write then goes into the world. A thread that waits for something without a limit of time, and a worker
of a pool without a job, are not at work; a thread that a library has started by itself is left alone unless it runs a
job of a pool or a line of the script.
"""

from __future__ import annotations

import concurrent.futures.thread as pool
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from keepstep.training.script_frames import of_script

__all__ = ["ScriptThreads"]

_TICK_S = 0.5
_JOB: CodeType = pool._WorkItem.run.__code__
_WAIT: CodeType = threading.Condition.wait.__code__


class ScriptThreads:
    """A context manager: inside it the threads that begin are kept in mind."""

    def __init__(self) -> None:
        self._direct: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._before: frozenset[threading.Thread] = frozenset()
        self._start: Any = None

    def __enter__(self) -> ScriptThreads:
        self._before = frozenset(threading.enumerate())
        self._start = original = threading.Thread.start
        direct = self._direct

        def start(thread: threading.Thread) -> None:
            if of_script(sys._getframe(1).f_code):
                direct.add(thread)
            original(thread)

        threading.Thread.start = start  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]

    def at_work(self) -> list[threading.Thread]:
        """Threads that began inside and are at work now."""
        frames = sys._current_frames()
        began = (one for one in threading.enumerate() if one not in self._before)
        return [one for one in began if one.is_alive() and self._works(one, frames.get(one.ident or 0))]

    def wait(self, ticks: int) -> list[str]:
        """The names of those that are still at work after `ticks` half seconds; returns as soon as there is none."""
        for _ in range(ticks):
            working = self.at_work()
            if not working and not self.at_work():  # twice: one may have been between two jobs
                return []
            for one in working[:1]:
                one.join(_TICK_S)
        return [one.name for one in self.at_work()]

    def _works(self, thread: threading.Thread, frame: FrameType | None) -> bool:
        if frame is None or isinstance(thread, threading._DummyThread):
            return False
        if thread in self._direct:
            return not (thread.daemon and _waits(frame))
        stack = list(_outwards(frame))
        return _JOB in stack or any(map(of_script, stack)) and not _waits(frame)


def _waits(frame: FrameType) -> bool:
    """Whether it waits until another thread wakes it, for as long as that takes."""
    return frame.f_code is _WAIT and frame.f_locals.get("timeout") is None


def _outwards(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
