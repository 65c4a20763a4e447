"""The lines of an NCCL RAS report in text, sorted into what they say of processes and communicators.

Their words are in `src/ras/client_support.cc` of NCCL. It names single ranks only where they are few; else it gives
their number, and `ncclras -v` names more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from keepstep.records.evidence import ReporterState

__all__ = ["Report", "Row", "Section", "reports_in"]

_About = Literal["missing", "error", "status", "counts"]

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COMMUNICATOR = re.compile(r"#(\d+)-(\d+)\s+\(([0-9a-fA-Fx:]+)[^)]*\)\s+([A-Z, ]+)\s*$")
_TABLE_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+([\d-]+)\s+([\d-]+)\s+([\d-]+)\s+([\d-]+)\s+([A-Z]+)\s+([A-Z,]+)\s*$")
_PROCESS = re.compile(r"Process\s+(\d+)\s+on\s+node\s+(\S+)\s+managing\s+GPUs?\s+([\d,\s-]+)")
_PROCESSES = re.compile(r"(\d+)\s+job\s+process(?:es)?\b")
_PLACE = (
    r"(?P<place>\s*--\s*(?:GPU\s+(?P<device>\S+)(?:\s*\([^)]*\))?\s+managed by process\s+(?P<pid>\d+)"
    r"\s+on node\s+(?P<node>\S+)|\[.*\]))?"
)
_RANK = re.compile(rf"Rank\s+(?P<rank>\d+)(?P<says>\b.*?){_PLACE}\s*$")
_MISSING = re.compile(r"The missing ranks?:\s*([\d,\s-]+)")
_MISSING_DATA = re.compile(r"Missing communicator data from\s+(\d+)\s+ranks?")
_ERRORS = re.compile(r"(?:Initialization|Asynchronous) errors? on\s+(\d+)\s+ranks?")
_REPORTED = re.compile(r"(?:(\d+)\s+ranks?)?\s*reported\s+(\S.*)")
_STATUS = re.compile(r"(?:(\d+)\s+ranks?)?\s*ha(?:ve|s)\s+status\s+(\w+)")
_LAUNCHED = re.compile(
    r"(?:(\d+)\s+ranks?)?\s*ha(?:ve|s)\s+(?:launched up to operation\s+(\d+)|not launched any operations)"
)
_KIND = re.compile(r"different\s+(?:(\w+)\s+)?(?:collective\s+)?operation counts")
_EVENT_DEAD = re.compile(r"PEER_DEAD:\s*Process\s+(\d+)\s+on\s+node\s+(\S+)\s+managing\s+GPUs?\s+([\d,\s-]+)")
_SUMMARY = re.compile(r"\s*(\d+)\s+\S+\s+\S+\s+(\d+)\s+(\d+)\s*$")
_LONGEST_LINE = 1000


@dataclass(slots=True)
class Section:
    """What the report says of one communicator in one respect."""

    name: str
    group: int
    about: _About | None = None
    kind: str = ""
    """The collective whose operations are counted; empty: all."""
    most: list[tuple[int, int]] = field(default_factory=list)
    """(number of ranks, newest operation), as summed up."""
    named: dict[int, int] = field(default_factory=dict)
    """Newest operation of the ranks that are named."""
    missing: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    """What the ranks that are named report."""
    expected: int = 0
    """How many ranks are missing, or report an error."""
    said: list[str] = field(default_factory=list)
    """Statuses, and ranks that have them, in words."""


@dataclass(slots=True)
class Row:
    """One row of the table: communicators alike."""

    count: int
    size: int
    """Ranks of each."""
    errors: str


@dataclass(slots=True)
class Report:
    """One report, as far as it was read."""

    total: int = 0
    """GPUs of the job, if the summary is there."""
    rows: dict[int, Row] = field(default_factory=dict)
    problem: str = ""
    unnamed: dict[str, int] = field(default_factory=dict)
    """DEAD and INCOMPLETE to the number of processes, named or not."""
    sections: list[Section] = field(default_factory=list)
    gone: dict[tuple[str, int], tuple[ReporterState, str]] = field(default_factory=dict)
    """Process (node, pid) to what RAS says of it, and its device."""
    places: dict[tuple[int, int], tuple[str, int, str]] = field(default_factory=dict)
    """(index of the section, rank in the communicator) to node, pid, device."""
    pending_value: int = 0
    pending_words: str = ""


def reports_in(text: str) -> list[Report]:
    """The reports in `text`, the newest last: a new one begins at a new list of communicators."""
    text = _COLOURS.sub("", text)
    starts = [match.start() for match in re.finditer(r"^.*(?:Communicators\.\.\.|Job summary).*$", text, re.MULTILINE)]
    cuts = [0]
    for start in starts[1:]:
        if "Communicators..." in text[cuts[-1] : start]:
            cuts.append(start)
    pieces = [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [report for report in map(_parsed, pieces) if report is not None]


def _parsed(text: str) -> Report | None:
    report = Report()
    for raw in text.splitlines():
        _take(report, raw.rstrip()[:_LONGEST_LINE])
    return report if report.rows or report.gone or report.sections or report.unnamed else None


def _take(report: Report, line: str) -> None:
    """Take one line into the report."""
    if event := _EVENT_DEAD.search(line):
        report.gone[(event[2], int(event[1]))] = ("dead", event[3].strip())
    elif opening := _COMMUNICATOR.search(line):
        report.sections.append(Section(opening[3], int(opening[1]), _about(opening[4])))
    elif line.strip() in ("DEAD", "INCOMPLETE"):
        report.problem = line.strip()
    elif process := _PROCESS.search(line):
        key = (process[2], int(process[1]))
        if report.problem == "DEAD" or key not in report.gone:
            report.gone[key] = ("dead" if report.problem == "DEAD" else "absent", process[3].strip())
    elif report.problem and (processes := _PROCESSES.search(line)):
        report.unnamed[report.problem] = int(processes[1])
    elif row := _TABLE_ROW.match(line):
        report.rows[int(row[1])] = Row(int(row[2]), _largest(row[5]), row[8])
    elif (total := _SUMMARY.match(line)) and not report.rows:
        report.total = int(total[3])
    elif report.sections:
        _take_member(report, line)


def _about(heading: str) -> _About | None:
    """What the lines below the heading of a communicator are about; None: the next line says it."""
    return "missing" if "INCOMPLETE" in heading else "error" if "ERROR" in heading else None


def _take_member(report: Report, line: str) -> None:
    """A line below the heading of a communicator."""
    if kind := _KIND.search(line):
        _next(report, "counts").kind = kind[1] or ""
    elif "ranks have different status" in line:
        _next(report, "status")
    elif errors := _ERRORS.search(line):
        _next(report, "error").expected += int(errors[1])
    elif missing := _MISSING_DATA.search(line):
        _next(report, "missing").expected = int(missing[1])
    elif listed := _MISSING.search(line):
        report.sections[-1].missing += [int(item) for item in re.findall(r"\d+", listed[1])]
    elif (rank := _RANK.search(line)) and (rank["place"] or _LAUNCHED.search(rank["says"])):
        if rank["node"]:
            place = (rank["node"], int(rank["pid"]), rank["device"])
            report.places[(len(report.sections) - 1, int(rank["rank"]))] = place
        _take_words(report, rank["says"], rank=int(rank["rank"]))
    else:
        _take_words(report, line, rank=None)


def _next(report: Report, about: _About) -> Section:
    """The section for lines about `about`: the newest one if nothing was said in it, else one more."""
    newest = report.sections[-1]
    if newest.about in (None, about) and not (newest.expected or newest.most or newest.said):
        newest.about = about
        return newest
    report.sections.append(Section(newest.name, newest.group, about))
    return report.sections[-1]


def _take_words(report: Report, words: str, *, rank: int | None) -> None:
    """What is said of a rank, or of so many ranks; ranks in lines of their own below that are meant too."""
    section = report.sections[-1]
    if launched := _LAUNCHED.search(words):
        report.pending_value = int(launched[2] or 0)
        section.about = section.about or "counts"
        section.most.append((int(launched[1] or 1), report.pending_value))
    elif status := _STATUS.search(words):
        report.pending_words = f"status {status[2]}"
        if status[1]:
            section.said.append(f"{status[1]} ranks have status {status[2]}")
    elif reported := _REPORTED.search(words):
        report.pending_words = reported[2].strip()
    elif words.strip():
        return
    if rank is None:
        return
    if section.about == "missing":
        section.missing.append(rank)
    elif section.about == "error":
        section.failed[rank] = report.pending_words
    elif section.about == "status":
        section.said.append(f"rank {rank} has {report.pending_words}")
    elif section.about == "counts":
        section.named[rank] = report.pending_value


def _largest(text: str) -> int:
    return max((int(item) for item in re.findall(r"\d+", text)), default=0)
