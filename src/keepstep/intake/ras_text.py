"""The text form of an NCCL RAS report as evidence: who is gone, who reports an error, who launched less."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.intake.ras_lines import Report, Section, reports_in
from keepstep.records.evidence import Evidence, GroupProgress, Place, Position, Reporter

__all__ = ["text_evidence"]

_MOST_RANKS = 1 << 20


def text_evidence(text: str, path: str) -> Iterator[Evidence]:
    """Records of the reports in `text`. If there are several (repeated queries), the last one counts.

    A lag that is the same in the last two reports is not that of a running job.
    """
    reports = reports_in(text)
    if not reports:
        return
    last = reports[-1]
    standing = len(reports) > 1 and _counts(reports[-1]) == _counts(reports[-2])
    worlds = _worlds(last)
    yield from _processes(last, worlds, path=path)
    for number, section in enumerate(last.sections):
        world = number in worlds
        yield from _failed(last, number, section=section, world=world, path=path)
        yield from _progress(last, number, section=section, standing=standing, world=world, path=path)
    unclear = _unclear(last, standing=standing)
    yield from (Reporter(state="unclear", detail=detail, path=path) for detail in unclear)
    if not last.gone and not last.sections and not unclear and last.rows:
        yield Reporter(
            state="present",
            detail=f"{sum(row.count for row in last.rows.values())} communicators, all members at the same operation",
            path=path,
        )


def _processes(report: Report, worlds: set[int], *, path: str) -> Iterator[Evidence]:
    """Where ranks run, and processes that are dead or gave no answer."""
    by_process: dict[tuple[str, int], int] = {}
    for (number, member), (node, pid, device) in report.places.items():
        if number in worlds:
            by_process[(node, pid)] = member
            yield Place(rank=member, node=node, device=device, pid=pid)
    lone_missing = [rank for number in worlds for rank in report.sections[number].missing]
    for (node, pid), (state, device) in report.gone.items():
        rank: int | None = by_process.get((node, pid))
        if rank is None and len(report.gone) == 1 and len(set(lone_missing)) == 1:
            rank = lone_missing[0]
        says = "considers its process dead" if state == "dead" else "got no answer from its process"
        yield Reporter(state=state, rank=rank, node=node, device=device, pid=pid, detail=f"RAS {says}", path=path)
    if not report.gone:
        for alone in sorted(set(lone_missing)):
            yield Reporter(state="absent", rank=alone, detail="RAS has no data of this rank", path=path)


def _failed(report: Report, number: int, *, section: Section, world: bool, path: str) -> Iterator[Reporter]:
    """Ranks that report an error."""
    for rank, words in section.failed.items():
        node, pid, device = report.places.get((number, rank), (None, None, None))
        detail = f"it reports to RAS: {words}"
        yield Reporter(
            state="failed", rank=rank if world else None, node=node, pid=pid, device=device, detail=detail, path=path
        )


def _worlds(report: Report) -> set[int]:
    """Sections on communicators whose ranks are global: the only one of the largest size, of all GPUs if known."""
    top = max([report.total, *(row.size for row in report.rows.values())])
    rows = {number for number, row in report.rows.items() if row.count == 1 and row.size >= top}
    if not report.rows and len({item.name for item in report.sections}) == 1:
        rows = {report.sections[0].group}
    return {number for number, item in enumerate(report.sections) if item.group in rows}


def _progress(
    report: Report, number: int, *, section: Section, standing: bool, path: str, world: bool
) -> Iterator[Evidence]:
    if not section.most or _halves(section, standing=standing):
        return
    most = next(iter(_unnamed(section)), max(section.most)[1])
    top = max(value for _, value in section.most)
    if not world:
        for rank, value in section.named.items():
            node, pid, device = report.places.get((number, rank), (None, None, None))
            if _lags(value, top, standing=standing):
                detail = f"{value} of {top} {section.kind} operations in communicator {section.name}"
                yield Reporter(state="behind", node=node, pid=pid, device=device, detail=detail, path=path)
        return
    row = report.rows.get(section.group)
    size = row.size if row is not None and row.size else sum(count for count, _ in section.most)
    size = min(max(size, *(rank + 1 for rank in section.named), 1), _MOST_RANKS)
    missing = {rank for other in report.sections if other.name == section.name for rank in other.missing}
    positions = tuple(
        Position(rank=rank, queued=section.named.get(rank, most)) for rank in range(size) if rank not in missing
    )
    yield GroupProgress(
        group=section.name,
        ranks=tuple(range(size)),
        positions=positions,
        description="NCCL communicator",
        kinds=section.kind or "launches",
        snapshot=not standing,
        path=path,
    )


def _unnamed(section: Section) -> list[int]:
    """Newest operations of which the report says how many ranks have launched them, and not which."""
    named = list(section.named.values())
    return [value for count, value in section.most if count > named.count(value)]


def _halves(section: Section, *, standing: bool) -> bool:
    """Whether ranks that are not named launched numbers further apart than those of a running job."""
    unnamed = _unnamed(section)
    return len(unnamed) > 1 and _lags(min(unnamed), max(unnamed), standing=standing)


def _lags(value: int, top: int, *, standing: bool) -> bool:
    """Whether a rank is further behind than a running job explains."""
    return value < top - 1 or (standing and value < top)


def _unclear(report: Report, *, standing: bool) -> list[str]:
    """What the report says without a rank or process that it could be put down to."""
    found = []
    if not report.gone:
        for problem, count in report.unnamed.items():
            found.append(f"{problem}: {count} processes, which RAS does not name")
    for section in report.sections:
        about = f"communicator {section.name}"
        if section.about == "missing" and section.expected > len(section.missing) and not report.gone:
            found.append(f"{about}: no data of {section.expected - len(section.missing)} ranks that RAS does not name")
        elif section.about == "error" and section.expected > len(section.failed):
            found.append(
                f"{about}: {section.expected - len(section.failed)} ranks report errors; RAS does not name them"
            )
        elif section.about == "status":
            found.append(f"{about}: ranks have different status: {', '.join(section.said[:8])}")
        elif _halves(section, standing=standing):
            counts = ", ".join(f"{count} up to {value}" for count, value in section.most[:8])
            kind = f"{section.kind} operations" if section.kind else "operations"
            found.append(f"{about}: ranks launched different numbers of {kind} ({counts}); RAS does not name them")
    told = {section.group for section in report.sections if section.about is not None}
    for number, row in report.rows.items():
        gone = row.errors == "INCOMPLETE" and (report.gone or report.unnamed)
        if row.errors != "OK" and number not in told and not gone:
            found.append(f"group {number} of the table: {row.errors}, with nothing said about it")
    return list(dict.fromkeys(found))


def _counts(report: Report) -> list[tuple[str, list[tuple[int, int]]]]:
    return [(item.name, sorted(item.most)) for item in report.sections if item.most]
