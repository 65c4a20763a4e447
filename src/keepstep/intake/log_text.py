"""Reads any log text: events by the recognisers of this package, stacks, pasted JSON; in one pass, bounded memory."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.application_text import APPLICATION_PATTERNS
from keepstep.intake.hardware_text import HARDWARE_PATTERNS
from keepstep.intake.health_text import HEALTH_PATTERNS, health_events
from keepstep.intake.launcher_text import LAUNCHER_PATTERNS, FailureTable
from keepstep.intake.log_lines import Line, Speaker, clean, lines_of, speaker_of
from keepstep.intake.log_patterns import Pattern, PatternIndex, events_of
from keepstep.intake.nccl_debug import NCCL_PATTERNS
from keepstep.intake.nccl_watchdog import WATCHDOG_PATTERNS
from keepstep.intake.notes_text import NOTE_PATTERNS
from keepstep.intake.pasted_table import TableRows
from keepstep.intake.pasted_text import PastedText
from keepstep.intake.phase_text import PHASE_PATTERNS
from keepstep.intake.reading import opened
from keepstep.intake.stack_text import StackCollector
from keepstep.intake.tracebacks import Tracebacks
from keepstep.records.evidence import MAY_BE_CAUGHT, Evidence, LogEvent, Unread

__all__ = ["MOST_OF_A_KIND", "READER", "LogReader", "rank_of_file"]

MOST_OF_A_KIND = 200
"""Events of one kind and speaker that are kept from one file: the first ones, and the newest of all."""
_QUOTED = 500
_LONGEST_FIELD = 2000
_LISTS = frozenset({"values", "ranks", "names", "report"})
"""Fields that say something of many ranks; a line bounds them already, and half of one would say something else."""
_LONGEST_WORD = 100
_LONGEST_LOOK = 6000
"""Characters of a line in which events are looked for, so that no line costs more than milliseconds."""
_LOOKED_AT = 8192
_OF_EACH_PROCESS = frozenset({"nccl_call"})
"""Kinds of events whose newest ones are compared between the processes of a node."""
_Speaking = tuple[str, int | None, str | None, int | None]
_LATEST_ONLY = frozenset({"step_progress", "progress_bar", "teardown"})
_NUMBERS = re.compile(r"(?<=0x)[0-9a-fA-F]+|0*[1-9][0-9]*")
_MOST_SHAPES = 20_000
_NAMED = re.compile(
    r"(?:^|[^a-z])(?P<kind>rank|worker|proc|trainer|task|log)[-_.]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE
)
_ELASTIC = re.compile(r"^(?:stdout|stderr)(?:\.log)?$")
_INDEX = PatternIndex(
    (
        *WATCHDOG_PATTERNS,
        *NCCL_PATTERNS,
        *HARDWARE_PATTERNS,
        *LAUNCHER_PATTERNS,
        *APPLICATION_PATTERNS,
        *HEALTH_PATTERNS,
        *PHASE_PATTERNS,
        *NOTE_PATTERNS,
    )
)


def rank_of_file(path: Path) -> int | None:
    """The rank that a file's name gives: `rank3.log`, `worker-3.out`, `attempt_0/3/stderr.log`; None if none."""
    name = path.name
    if _ELASTIC.match(name) and path.parent.name.isdigit():
        return int(path.parent.name)
    found = _NAMED.search(name)
    return int(found["rank"]) if found else None


class LogReader:
    """Log text of any kind."""

    @property
    def name(self) -> str:
        """What people call it."""
        return "log text"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Text: not empty, few control characters, few bytes that no encoding of text has."""
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return True
        odd = sum(head.count(bytes((code,))) for code in (*range(7), *range(14, 27), *range(28, 32)))
        unknown = head[:_LOOKED_AT].decode("utf-8", "replace").count("\ufffd")
        return bool(head.strip()) and odd <= len(head) // 50 and unknown <= len(head[:_LOOKED_AT]) // 4

    def read(self, path: Path) -> Iterator[Evidence]:
        """Events and stacks in the order of the file; what comes after damage is an Unread."""
        yield from _Reading(path).evidence()


READER = LogReader()


class _Reading:
    """One pass over one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_rank = rank_of_file(path)
        self._pasted = PastedText(path)
        self._table = FailureTable()
        self._rows = TableRows()
        self._traces = Tracebacks()
        self._stacks = StackCollector(str(path), rank=self._file_rank)
        self._counts: dict[_Speaking, int] = {}
        self._latest: dict[_Speaking, LogEvent] = {}
        self._shapes: dict[str, tuple[Pattern, ...]] = {}
        self._dull: dict[str, bool] = {}
        self._aside: dict[str, tuple[Line, int]] = {}
        self._lines = 0
        self._last_put_off: Line | None = None
        self._stepped: LogEvent | None = None
        self._erred = False
        self._after_errors: list[Line] = []

    def evidence(self) -> Iterator[Evidence]:
        with opened(self._path) as stream:
            try:
                for line in lines_of(stream):
                    self._lines = line.number
                    yield from self._line(line)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                yield Unread(path=str(self._path), why=f"damaged after line {self._lines}: {error}")
        yield from self._block(self._pasted.finish())
        yield from self._stacks.finish()
        last = Line(self._lines, "end of a table")
        for kind, fields in self._rows.finish():
            yield self._event(kind, fields, line=last, speaker=speaker_of(last.text))
        yield from self._put_aside()
        yield from sorted(self._latest.values(), key=lambda event: event.line)
        yield LogEvent(kind="log_read", path=str(self._path), line=self._lines, text=f"{self._lines} lines read")

    def _line(self, line: Line) -> Iterator[Evidence]:
        """A shape that said nothing before says nothing now, unless something of several lines is being read."""
        shape = _NUMBERS.sub("1", line.text)
        progress = self._dull.get(shape)
        if progress is None or self._reading:
            yield from self._looked_at(line, shape)
        elif progress:
            self._put_off(line, shape)

    @property
    def _reading(self) -> bool:
        """Whether something of several lines is being read."""
        return self._pasted.busy or self._stacks.busy or self._rows.busy or self._traces.busy

    def _says_nothing(self, text: str) -> bool:
        """Whether a line without events changes nothing for those that follow."""
        readers = (self._pasted, self._traces, self._stacks, self._table)
        return len(text) <= _LONGEST_LOOK and text[:1] != "{" and not any(reader.heeds(text) for reader in readers)

    def _looked_at(self, line: Line, shape: str) -> Iterator[Evidence]:
        calm = not self._reading and self._says_nothing(line.text)
        block = self._pasted.feed(line)
        yield from self._block(block)
        if self._pasted.skips:
            return
        if line.text.startswith("{"):
            line = Line(line.number, _unwrapped(line.text))
        if len(line.text) > _LONGEST_LOOK:
            line = Line(line.number, _cut(line.text, _LONGEST_LOOK))
        self._traces.feed(line)
        yield from self._stacks.feed(line)
        patterns = self._fitting(line, shape)
        table = [*self._table.feed(line), *self._rows.feed(line)]
        if patterns or table:
            found = [*events_of(patterns, line.text), *table]
            speaker = speaker_of(line.text)
            for kind, fields in found:
                yield from self._kept(self._event(kind, fields, line=line, speaker=speaker))
        if (report := self._traces.mismatch(line)) is not None:
            yield self._event("mismatch_ranks", {"report": report}, line=line, speaker=speaker_of(line.text))
        if calm and block is None and not (patterns or table or self._reading):
            self._remember(shape)

    def _remember(self, shape: str) -> None:
        """Lines of this shape need no second look."""
        if len(self._dull) >= _MOST_SHAPES:
            self._dull.clear()
        self._dull[shape] = shape in self._aside

    def _put_off(self, line: Line, shape: str) -> None:
        """Count a line that only tells of progress; the newest of its shape is looked at in the end."""
        self._last_put_off = line
        self._note_step(line)
        self._aside[shape] = (line, self._aside.get(shape, (line, 0))[1] + 1)
        if len(self._aside) > _MOST_SHAPES:
            self._aside.pop(next(iter(self._aside)))

    def _fitting(self, line: Line, shape: str) -> tuple[Pattern, ...]:
        """Patterns for a line. Lines that differ only in numbers are looked up by their shape; those that only tell of
        progress are put aside, the newest of each shape, until the end."""
        patterns = self._shapes.get(shape)
        if patterns is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            patterns = self._shapes[shape] = _INDEX.fitting(line.text)
        elif patterns and not self._pasted.prose and all(one.kind in _LATEST_ONLY for one in patterns):
            self._put_off(line, shape)
            return ()
        return patterns

    def _put_aside(self) -> Iterator[LogEvent]:
        """Events of the lines that were put aside: the newest of each shape, and the first after each error."""
        for line in self._after_errors:
            told = dict(events_of(_INDEX.fitting(line.text), line.text)).get("step_progress")
            if told is not None:
                yield self._event("step_after_error", told, line=line, speaker=speaker_of(line.text))
        for line, count in sorted(self._aside.values(), key=lambda item: item[0].number):
            speaker = speaker_of(line.text)
            for kind, fields in events_of(_INDEX.fitting(line.text), line.text):
                fields = fields | {"seen": str(count)}
                yield from self._kept(self._event(kind, fields, line=line, speaker=speaker))

    def _event(self, kind: str, fields: dict[str, str], *, line: Line, speaker: Speaker) -> LogEvent:
        """The event with the identity that the line, the fields and the file's name give, in this order."""
        if kind == "exception":
            fields = fields | self._traces.stack_for(line)
        if kind in MAY_BE_CAUGHT:
            self._erred = True
            fields = fields | ({"after_step": step} if (step := self._step_before()) else {})
        if speaker.local is not None:
            fields = fields | {"local": str(speaker.local)}
        if self._pasted.prose:
            fields = fields | {"claimed": "yes"}
        rank = speaker.rank
        if rank is None and not kind.startswith(("note_", "phase_table")):
            rank = int(fields["rank"]) if fields.get("rank", "").isdigit() else self._file_rank
        event = LogEvent(
            kind=kind,
            path=str(self._path),
            line=line.number,
            text=line.text[:_QUOTED],
            rank=rank,
            node=speaker.node or fields.get("host") or None,
            pid=speaker.pid,
            wall=speaker.wall,
            fields={key: value if key in _LISTS else _cut(value, _LONGEST_FIELD) for key, value in fields.items()},
        )
        if kind == "step_progress":
            self._stepped = event
            self._note_step(line)
        return event

    def _note_step(self, line: Line) -> None:
        """Remember the first line of progress after an error: it tells whether training went on or began again."""
        if self._erred:
            self._erred = False
            self._after_errors.append(line)

    def _step_before(self) -> str:
        """The newest step that was told so far; empty if none was."""
        newest, line = self._stepped, self._last_put_off
        if line is not None and (newest is None or newest.line < line.number):
            told = dict(events_of(_INDEX.fitting(line.text), line.text)).get("step_progress")
            if told is not None:
                return told.get("step", "")
        return newest.fields.get("step", "") if newest is not None else ""

    def _kept(self, event: LogEvent) -> Iterator[LogEvent]:
        """The event now, or later if there are too many of its kind."""
        key = (event.kind, event.rank, event.node, event.pid if event.kind in _OF_EACH_PROCESS else None)
        count = self._counts.get(key, 0) + 1
        self._counts[key] = count
        if count > MOST_OF_A_KIND or (event.kind in _LATEST_ONLY and count > 1):
            self._latest[key] = msgspec.structs.replace(event, fields=event.fields | {"seen": str(count)})
        else:
            yield event

    def _block(self, block: tuple[int, bytes] | None) -> Iterator[LogEvent]:
        """Events of a pasted JSON document; one that is no result of a check says nothing."""
        if block is None:
            return
        try:
            yield from health_events(block[1], path=str(self._path), line=block[0])
        except RecordError:
            return


def _cut(text: str, longest: int) -> str:
    """The beginning of a text, without a word or number that would be cut in two."""
    if len(text) <= longest:
        return text
    end = longest
    while end and (text[end].isalnum() or text[end] in "._-") and longest - end < _LONGEST_WORD:
        end -= 1
    return text[: end + 1]


def _unwrapped(text: str) -> str:
    """The message of a log line that is a JSON object, with its rank in front; the line itself if it is none."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(entry, dict):
        return text
    message = next(
        (entry[key] for key in ("message", "msg", "log", "text", "event") if isinstance(entry.get(key), str)), None
    )
    if message is None:
        return text
    rank = entry.get("rank")
    return clean(f"[rank{rank}]: {message}" if isinstance(rank, int) else message)
