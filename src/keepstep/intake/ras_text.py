"""The text form of an NCCL RAS report, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.records.evidence import Evidence, GroupProgress, Place, Position, Reporter, ReporterState

__all__ = ["text_evidence"]

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COMMUNICATOR = re.compile(r"#(\d+)-(\d+)\s+\(([0-9a-fA-Fx:]+)[^)]*\)\s+([A-Z, ]+)\s*$")
_TABLE_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+([\d-]+)\s+([\d-]+)\s+([\d-]+)\s+([\d-]+)\s+([A-Z]+)\s+([A-Z,]+)\s*$")
_PROCESS = re.compile(r"Process\s+(\d+)\s+on\s+node\s+(\S+)\s+managing\s+GPUs?\s+([\d,\s-]+)")
_RANK = re.compile(r"Rank\s+(\d+)\b.*?(?:--\s*GPU\s+(\S+)\s+managed by process\s+(\d+)\s+on node\s+(\S+))?\s*$")
_MISSING = re.compile(r"The missing ranks?:\s*([\d,\s-]+)")
_MANY = re.compile(r"(\d+)\s+ranks?\s+ha(?:ve|s)\s+(?:launched up to operation\s+(\d+)|not launched any operations)")
_ONE = re.compile(r"Rank\s+(\d+)\s+has\s+(?:launched up to operation\s+(\d+)|not launched any operations)")
_KIND = re.compile(r"different\s+(?:(\w+)\s+)?(?:collective\s+)?operation counts")
_EVENT_DEAD = re.compile(r"PEER_DEAD:\s*Process\s+(\d+)\s+on\s+node\s+(\S+)\s+managing\s+GPUs?\s+([\d,\s-]+)")
_SUMMARY = re.compile(r"\s*(\d+)\s+\S+\s+\S+\s+(\d+)\s+(\d+)\s*$")
_MOST_RANKS = 1 << 20


@dataclass(slots=True)
class _Communicator:
    """What the report says of one communicator."""

    name: str
    group: int
    kind: str = ""
    most: list[tuple[int, int]] = field(default_factory=list)
    """(number of ranks, newest operation), as summed up."""
    named: dict[int, int] = field(default_factory=dict)
    """Newest operation of the ranks that are named."""
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Report:
    """One report, as far as it was read."""

    total: int = 0
    """GPUs of the job, if the summary is there."""
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number of a row of the table to (communicators in it, ranks of each)."""
    problem: str = ""
    communicators: list[_Communicator] = field(default_factory=list)
    gone: dict[tuple[str, int], tuple[ReporterState, str]] = field(default_factory=dict)
    """Process (node, pid) to what RAS says of it, and its device."""
    places: dict[tuple[int, int], tuple[str, int, str]] = field(default_factory=dict)
    """(index of the communicator, rank in it) to node, pid, device."""
    pending_value: int = 0


def text_evidence(text: str, path: str) -> Iterator[Evidence]:
    """Records of the reports in `text`. If there are several (repeated queries), the last one counts.

    A lag that is the same in the last two reports is not that of a running job.
    """
    reports = [report for report in map(_parsed, _split(_COLOURS.sub("", text))) if report is not None]
    if not reports:
        return
    last = reports[-1]
    standing = len(reports) > 1 and _counts(reports[-1]) == _counts(reports[-2])
    worlds = _worlds(last)
    by_process: dict[tuple[str, int], int] = {}
    for (number, member), (node, pid, device) in last.places.items():
        if number in worlds:
            by_process[(node, pid)] = member
            yield Place(rank=member, node=node, device=device, pid=pid)
    lone_missing = [rank for number in worlds for rank in last.communicators[number].missing]
    for (node, pid), (state, device) in last.gone.items():
        rank: int | None = by_process.get((node, pid))
        if rank is None and len(last.gone) == 1 and len(set(lone_missing)) == 1:
            rank = lone_missing[0]
        says = "considers its process dead" if state == "dead" else "got no answer from its process"
        yield Reporter(state=state, rank=rank, node=node, device=device, pid=pid, detail=f"RAS {says}", path=path)
    if not last.gone:
        for alone in sorted(set(lone_missing)):
            yield Reporter(state="absent", rank=alone, detail="RAS has no data of this rank", path=path)
    for number, communicator in enumerate(last.communicators):
        yield from _progress(
            last, number, communicator=communicator, standing=standing, path=path, world=number in worlds
        )
    if not last.gone and not last.communicators and last.sizes:
        rows = last.sizes.values()
        yield Reporter(
            state="present",
            detail=f"{sum(count for count, _ in rows)} communicators, all members at the same operation",
            path=path,
        )


def _split(text: str) -> list[str]:
    """The text of each report: a new one begins at a new list of communicators."""
    starts = [match.start() for match in re.finditer(r"^.*(?:Communicators\.\.\.|Job summary).*$", text, re.MULTILINE)]
    cuts = [0]
    for start in starts[1:]:
        if "Communicators..." in text[cuts[-1] : start]:
            cuts.append(start)
    return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _parsed(text: str) -> _Report | None:
    report = _Report()
    for raw in text.splitlines():
        _take(report, raw.rstrip()[:1000])
    return report if report.sizes or report.gone or report.communicators else None


def _take(report: _Report, line: str) -> None:
    """Take one line into the report."""
    if event := _EVENT_DEAD.search(line):
        report.gone[(event[2], int(event[1]))] = ("dead", event[3].strip())
    elif opening := _COMMUNICATOR.search(line):
        report.communicators.append(_Communicator(opening[3], int(opening[1])))
    elif line.strip() in ("DEAD", "INCOMPLETE"):
        report.problem = line.strip()
    elif process := _PROCESS.search(line):
        key = (process[2], int(process[1]))
        if report.problem == "DEAD" or key not in report.gone:
            report.gone[key] = ("dead" if report.problem == "DEAD" else "absent", process[3].strip())
    elif row := _TABLE_ROW.match(line):
        report.sizes[int(row[1])] = (int(row[2]), _largest(row[5]))
    elif (total := _SUMMARY.match(line)) and not report.sizes:
        report.total = int(total[3])
    elif report.communicators:
        _take_member(report, report.communicators[-1], line=line)


def _take_member(report: _Report, communicator: _Communicator, *, line: str) -> None:
    """A line below the heading of a communicator."""
    number = len(report.communicators) - 1
    if kind := _KIND.search(line):
        communicator.kind = kind[1] or ""
    elif one := _ONE.search(line):
        communicator.named[int(one[1])] = int(one[2] or 0)
        communicator.most.append((1, int(one[2] or 0)))
        _place(report, number, line=line)
    elif many := _MANY.search(line):
        report.pending_value = int(many[2] or 0)
        communicator.most.append((int(many[1]), report.pending_value))
    elif missing := _MISSING.search(line):
        communicator.missing += [int(item) for item in re.findall(r"\d+", missing[1])]
    elif rank := _RANK.search(line):
        _place(report, number, line=line)
        if communicator.most:
            communicator.named[int(rank[1])] = report.pending_value
        else:
            communicator.missing.append(int(rank[1]))


def _place(report: _Report, number: int, *, line: str) -> None:
    member = _RANK.search(line)
    if member and member[4]:
        report.places[(number, int(member[1]))] = (member[4], int(member[3]), member[2])


def _worlds(report: _Report) -> set[int]:
    """Communicators whose ranks are global: the only one of the largest size, of all GPUs if that is known."""
    rows = {number for number, (count, size) in report.sizes.items() if count == 1 and size >= _top(report)}
    if not report.sizes and len({item.name for item in report.communicators}) == 1:
        rows = {report.communicators[0].group}
    return {number for number, item in enumerate(report.communicators) if item.group in rows}


def _top(report: _Report) -> int:
    return max([report.total, *(size for _, size in report.sizes.values())])


def _progress(
    report: _Report, number: int, *, communicator: _Communicator, standing: bool, path: str, world: bool
) -> Iterator[Evidence]:
    if not communicator.most:
        return
    most = max(communicator.most)[1]
    top = max(value for _, value in communicator.most)
    if not world:
        for rank, value in communicator.named.items():
            node, pid, device = report.places.get((number, rank), (None, None, None))
            if value < top - 1 or (standing and value < top):
                detail = f"{value} of {top} {communicator.kind} operations in communicator {communicator.name}"
                yield Reporter(state="behind", node=node, pid=pid, device=device, detail=detail, path=path)
        return
    size = report.sizes.get(communicator.group, (1, 0))[1] or sum(count for count, _ in communicator.most)
    size = min(max(size, *(rank + 1 for rank in communicator.named), 1), _MOST_RANKS)
    positions = tuple(
        Position(rank=rank, queued=communicator.named.get(rank, most))
        for rank in range(size)
        if rank not in communicator.missing
    )
    yield GroupProgress(
        group=communicator.name,
        ranks=tuple(range(size)),
        positions=positions,
        description="NCCL communicator",
        kinds=communicator.kind or "launches",
        snapshot=not standing,
        path=path,
    )


def _counts(report: _Report) -> list[tuple[str, list[tuple[int, int]]]]:
    return [(item.name, sorted(item.most)) for item in report.communicators if item.most]


def _largest(text: str) -> int:
    return max((int(item) for item in re.findall(r"\d+", text)), default=0)
