"""Python tracebacks and reports of several lines, gathered for each speaker although lines are interleaved."""

from __future__ import annotations

import re

from keepstep.intake.log_lines import Line

__all__ = ["Tracebacks"]

_FRAME = re.compile(r'^(?P<prefix>.*?)\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_BEGIN = re.compile(r"^(?P<prefix>.*?)\s*Traceback \(most recent call last\):")
_MOST_FRAMES = 40
_MOST_SPEAKERS = 1024
_REPORT_LINES = 3
_REPORT = "mismatch between collectives"


class Tracebacks:
    """Frames of the traceback that each speaker is printing, and reports that go on over the next lines."""

    def __init__(self) -> None:
        """Nothing is being printed."""
        self._frames: dict[str, list[str]] = {}
        self._report = ""
        self._left = 0

    @property
    def busy(self) -> bool:
        """Whether a report of several lines is being read."""
        return self._left > 0

    def heeds(self, text: str) -> bool:
        """Whether a line belongs to a traceback or begins a report."""
        return 'File "' in text or "Traceback (most" in text or _REPORT in text

    def feed(self, line: Line) -> None:
        """Look at a line."""
        if "Traceback (most" in line.text and (begin := _BEGIN.match(line.text)):
            self._frames.pop(begin["prefix"].strip(), None)
        elif 'File "' in line.text and (frame := _FRAME.match(line.text)):
            self._add(frame["prefix"].strip(), f"{frame['function']} ({frame['file']}:{frame['line']})")

    def _add(self, speaker: str, frame: str) -> None:
        if len(self._frames) < _MOST_SPEAKERS or speaker in self._frames:
            frames = self._frames.setdefault(speaker, [])
            frames.append(frame)
            del frames[:-_MOST_FRAMES]

    def stack_for(self, line: Line) -> dict[str, str]:
        """`stack` of the exception on this line, innermost last, separated by ` > `; {} if none was printed."""
        key = next(
            (prefix for prefix in sorted(self._frames, key=len, reverse=True) if line.text.startswith(prefix)), None
        )
        frames = self._frames.pop(key, None) if key is not None else None
        return {"stack": " > ".join(frames[-12:])} if frames else {}

    def mismatch(self, line: Line) -> str | None:
        """The whole report of collectives that differ, once it names two ranks or three more lines have passed."""
        if _REPORT in line.text:
            self._report, self._left = line.text, _REPORT_LINES
        elif self._left:
            self._report += "\n" + line.text
            self._left -= 1
        else:
            return None
        if len(set(re.findall(r"\bRank (\d+)\b", self._report.split(_REPORT, 1)[1]))) >= 2 or not self._left:
            self._left = 0
            return self._report
        return None
