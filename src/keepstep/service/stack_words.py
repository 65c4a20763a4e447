"""A stack in words: the source line of the innermost call, and of the innermost one of the script's own."""

from __future__ import annotations

import linecache
import re
import zlib

from keepstep.diagnosis.stack_places import StackPlace, place_of
from keepstep.records.evidence import Frame
from keepstep.service.stacks import StackFrame

__all__ = [
    "digest_of",
    "line_of",
    "own_line",
    "place_words",
    "standing_of",
    "stands_at_a_lock",
    "waits_for_a_process",
    "waits_for_work",
]

_MOST = 120
_LOCK_LINE = re.compile(
    r"\.(acquire|join|wait|wait_for)\(|\.get\((\)|timeout|block)|\b(flock|lockf)\("
    r"|\bwith\b.*(lock|cond|sem)|^(async )?with\b[^()]*:",
    re.IGNORECASE,
)
"""The innermost line of Python: what it calls is not. `with NAME:` stands at what a lock of C does there."""
_WAIT_LINE = re.compile(r"\.wait\(")
_CHILD_LINE = re.compile(r"\bos\.(wait\w*|system)\(|\bwaitpid\(")
_CHILD_FILES = ("/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/popen_forkserver.py")


def digest_of(frames: tuple[StackFrame, ...]) -> int:
    """63 bits that change when a thread stands somewhere else; 0 where its stack is unknown."""
    if not frames:
        return 0
    text = "\n".join(f"{frame.function} {frame.file}:{frame.line}" for frame in frames).encode()
    return (zlib.crc32(text) << 31 | zlib.adler32(text) >> 1) or 1


def standing_of(frames: tuple[StackFrame, ...]) -> StackPlace:
    """Where a main thread with these frames, innermost first, stands."""
    return place_of(tuple(Frame(frame.function, frame.file, frame.line) for frame in frames))


def stands_at_a_lock(frames: tuple[StackFrame, ...]) -> bool:
    """Whether the innermost call of a main thread waits for another thread of the script."""
    where = standing_of(frames).where
    if where in ("data", "collective", "storage") or waits_for_work(frames):
        return False
    return where == "lock" or (bool(frames) and bool(_LOCK_LINE.search(line_of(frames[0]))))


def waits_for_work(frames: tuple[StackFrame, ...]) -> bool:
    """Whether the script itself calls a `wait` that is none of Python: that of a collective that goes on (or a store).

    Waits of threads and processes are written in Python, and would be the innermost frame.
    """
    return bool(frames) and _own(frames) is frames[0] and bool(_WAIT_LINE.search(line_of(frames[0])))


def waits_for_a_process(frames: tuple[StackFrame, ...]) -> bool:
    """Whether the innermost call waits for a process that the script started: an upload, a compressor, an evaluator."""
    return bool(frames) and (frames[0].file.endswith(_CHILD_FILES) or bool(_CHILD_LINE.search(line_of(frames[0]))))


def line_of(frame: StackFrame) -> str:
    """The text of the line a frame stands at; empty if the file cannot be read."""
    return linecache.getline(frame.file, frame.line).strip()[:_MOST]


def own_line(frames: tuple[StackFrame, ...]) -> str:
    """The innermost call that belongs to the script, with its line; empty if there is none."""
    own = _own(frames)
    return _words(own) if own is not None else ""


def place_words(frames: tuple[StackFrame, ...]) -> str:
    """The innermost call and, if that is another, the innermost one of the script's own."""
    if not frames:
        return "an unknown place"
    own = _own(frames)
    inner = _words(frames[0])
    return inner if own is None or own is frames[0] else f"{inner}, called from {_words(own)}"


def _own(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    foreign = ("site-packages", "/lib/python", "keepstep/training/", "<frozen")
    return next((frame for frame in frames if not any(part in frame.file for part in foreign)), None)


def _words(frame: StackFrame) -> str:
    source = line_of(frame)
    return f"{frame.function} ({frame.file}:{frame.line})" + (f": {source}" if source else "")
