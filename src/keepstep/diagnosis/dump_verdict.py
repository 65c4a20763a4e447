"""Everything that dumps and tables of other tools say about one job, as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from keepstep.diagnosis.group_progress import WORLD
from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.inspected import diagnose_inspected, inspected_progress, lone_finding
from keepstep.diagnosis.roll_call import diagnose_reporters, unclear_finding
from keepstep.diagnosis.same_process import Remembered, are_of_two, are_of_two_starts
from keepstep.diagnosis.stragglers import diagnose_tables
from keepstep.diagnosis.trace_verdict import diagnose_trace
from keepstep.diagnosis.wavefront import diagnose_hang
from keepstep.records.evidence import (
    CollectiveRecord,
    Evidence,
    GroupProgress,
    Place,
    Position,
    Reporter,
    StepTiming,
    Transfer,
    TransferCount,
    Unread,
)
from keepstep.records.finding import Finding
from keepstep.records.operation_trace import OperationTrace
from keepstep.records.timing_table import TimingTable, joined, tables_of

__all__ = ["diagnose_dumps"]


def diagnose_dumps(evidence: Iterable[Evidence]) -> tuple[Finding, ...]:
    """Findings of one job from the evidence of all its files; empty if nothing of it is for this function.

    A single `healthy` finding if the evidence speaks of the job and nothing is wrong. Log events and stacks are not
    looked at. A rank that appears in several dumps of one moment counts once, by the dump that goes furthest.
    """
    given = list(evidence)
    everything, doubled = _once_a_rank(given)
    places = [item for item in everything if isinstance(item, Place)]
    reporters = [item for item in everything if isinstance(item, Reporter)]
    records = [item for item in everything if isinstance(item, CollectiveRecord)]
    reported = [item for item in everything if isinstance(item, GroupProgress)]
    torn = {one.path for one in reporters if one.state == "truncated"}
    groups = [*reported, *inspected_progress(records, torn=torn)]
    transfers = [item for item in everything if isinstance(item, Transfer | TransferCount)]
    called = diagnose_reporters(reporters, places)
    hangs = list(_hangs(groups, transfers, reporters=reporters, places=places, given=given))
    slow = _slow(everything, records)
    hangs = [_of_several_dumps(finding, doubled) for finding in hangs]
    findings = [*called, *_not_said_twice(hangs, called), *slow]
    wrong = [finding for finding in findings if finding.kind != "healthy"]
    if not wrong and (unclear := unclear_finding(reporters)) is not None:
        return (unclear,)
    if not wrong and (groups or reporters):
        inspected = {record.path for record in records if record.duration_s is not None}
        others = [one for one in reporters if one.path not in inspected]
        if not reported and not others and not slow and (lone := lone_finding(records)) is not None:
            return (lone,)
        return (_fine(groups, others), *slow)
    return tuple(wrong or findings[:1])


def _hangs(
    groups: Sequence[GroupProgress],
    transfers: Sequence[Transfer | TransferCount],
    *,
    reporters: Sequence[Reporter],
    places: Sequence[Place],
    given: Sequence[Evidence],
) -> Iterator[Finding]:
    """Who stands still, in each moment by itself; nobody in dumps of which some are another job's."""
    moments = [*(group.moment for group in groups), *(transfer.moment for transfer in transfers)]
    for moment in dict.fromkeys(("", *moments)):
        then = [group for group in groups if group.moment == moment]
        moved = [transfer for transfer in transfers if transfer.moment == moment]
        reports = [item for item in given if isinstance(item, GroupProgress) and item.moment == moment]
        strange = _two_worlds(reports) or _two_processes(reports) or _two_starts(then)
        if strange is not None:
            yield strange
            continue
        open_ = [transfer for transfer in moved if isinstance(transfer, Transfer)]
        counts = [transfer for transfer in moved if isinstance(transfer, TransferCount)]
        for finding in diagnose_hang(then, open_, counts=counts, reporters=reporters, places=places):
            seen = (f"seen in {moment}",) if moment else ()
            yield msgspec.structs.replace(finding, evidence=(*finding.evidence, *seen))


def _two_worlds(groups: Iterable[GroupProgress]) -> Finding | None:
    """The finding that dumps do not belong together: they name different members of the group of all ranks."""
    worlds: dict[tuple[int, ...], GroupProgress] = {}
    for group in groups:
        if group.description == WORLD and group.ranks and group.members_known:
            worlds.setdefault(group.ranks, group)
    if len(worlds) < 2:
        return None
    return Finding(
        kind="undetermined",
        confidence=0.3,
        evidence=(
            "these are files of two jobs, or of two starts of one: they do not agree who the ranks of the job are",
            *(f"{group.path}: {len(ranks)} ranks, {listed(ranks)}" for ranks, group in list(worlds.items())[:4]),
        ),
        next_probe="the files of each job in a directory of their own",
    )


def _two_processes(groups: Iterable[GroupProgress]) -> Finding | None:
    """The finding that dumps do not belong together: two of one rank cannot be of one process."""
    known: dict[tuple[int, str], list[tuple[Remembered, str]]] = {}
    for group in groups:
        for position in group.positions:
            if not position.remembered:
                continue
            others = known.setdefault((position.rank, group.group), [])
            for calls, path in others:
                if path != group.path and are_of_two(calls, position.remembered):
                    return _not_told_apart(position.rank, path, group.path)
            others.append((position.remembered, group.path))
    return None


def _two_starts(groups: Iterable[GroupProgress]) -> Finding | None:
    """The finding that dumps do not belong together: what one member of a group finished another never called, and
    they were at work at different times."""
    members: dict[tuple[str, tuple[int, ...]], list[tuple[Position, GroupProgress]]] = {}
    for group in groups:
        if (group.ranks or group.description == WORLD) and not group.snapshot:
            members.setdefault((group.group, group.ranks), []).extend((one, group) for one in group.positions)
    for pairs in members.values():
        furthest = max(pairs, key=lambda pair: pair[0].finished or 0)
        last = min(pairs, key=lambda pair: pair[0].queued or 0)
        for position, group in pairs:
            for other, beside in (furthest, last):
                if are_of_two_starts(position, other):
                    paths = sorted({group.path, beside.path})
                    return _of_two_starts(sorted((position.rank, other.rank)), paths)
    return None


def _of_two_starts(ranks: Sequence[int], paths: Sequence[str]) -> Finding:
    return Finding(
        kind="undetermined",
        confidence=0.3,
        evidence=(
            f"these are files of two jobs, or of two starts of one: of {listed(ranks)} one finished collectives that "
            "the other never called, and they made all their calls at different times",
            *paths,
        ),
        next_probe="the files of each job in a directory of their own",
    )


def _not_told_apart(rank: int, *paths: str) -> Finding:
    return Finding(
        kind="undetermined",
        confidence=0.3,
        evidence=(
            f"these are files of two jobs, or of two starts of one: two processes wrote them as rank {rank}, and their "
            "names and folders do not tell which files belong together",
            *paths,
        ),
        next_probe="the files of each job in a directory of their own",
    )


def _slow(everything: Sequence[Evidence], records: Sequence[CollectiveRecord]) -> list[Finding]:
    """Findings from times: tables, single timings, traces, collectives with durations."""
    tables = [item for item in everything if isinstance(item, TimingTable)]
    tables += tables_of(item for item in everything if isinstance(item, StepTiming))
    parts = _paths(tables)
    found = [_placed(finding, part, apart=len(parts) > 1) for part in parts for finding in diagnose_tables(part)]
    found += diagnose_inspected(records)
    for item in everything:
        if isinstance(item, OperationTrace):
            found += diagnose_trace(item)
    return found


def _placed(finding: Finding, tables: Sequence[TimingTable], *, apart: bool) -> Finding:
    """The finding with the file that it is from, where files are judged apart."""
    paths = {table.path for table in tables if table.path}
    if not apart or len(paths) != 1:
        return finding
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, f"seen in {paths.pop()}"))


def _paths(tables: Sequence[TimingTable]) -> list[list[TimingTable]]:
    """Tables of one file together; files with one member each are one table in parts."""
    by_path: dict[str, list[TimingTable]] = {}
    for table in tables:
        single = len(table.who) > 0 and int(table.who.min()) == int(table.who.max())
        by_path.setdefault("" if single else table.path, []).append(table)
    parts = by_path.pop("", [])
    together = [joined(same) for phase in dict.fromkeys(part.phase for part in parts) if (same := _of(parts, phase))]
    return [*by_path.values(), *([together] if together else [])]


def _of(tables: Sequence[TimingTable], phase: str) -> list[TimingTable]:
    return [table for table in tables if table.phase == phase]


def _not_said_twice(hangs: Iterable[Finding], called: Sequence[Finding]) -> list[Finding]:
    """Hang findings without those about ranks that are already called dead, absent or failed."""
    named = {suspect.rank for finding in called for group in finding.suspects for suspect in group}
    kept = []
    for finding in hangs:
        suspected = {suspect.rank for group in finding.suspects for suspect in group}
        if not (suspected and suspected <= named):
            kept.append(finding)
    return kept


def _fine(groups: Sequence[GroupProgress], reporters: Sequence[Reporter]) -> Finding:
    heard = {position.rank for group in groups for position in group.positions}
    heard.update(reporter.rank for reporter in reporters if reporter.rank is not None)
    empty = [reporter for reporter in reporters if reporter.state in ("empty", "truncated")]
    if empty and len(empty) == len(reporters):
        return Finding(
            kind="undetermined",
            confidence=0.1,
            evidence=tuple(f"rank {item.rank}: {item.state}. {item.detail}" for item in empty[:8]),
            next_probe="dumps with entries: set TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before 2.7)",
        )
    details = [reporter.detail for reporter in reporters if reporter.rank is None and reporter.detail]
    return Finding(
        kind="healthy",
        confidence=0.8,
        evidence=(
            f"{len(heard)} ranks in {len({group.group for group in groups})} groups: nobody waits for anybody"
            if heard
            else "nobody is missing",
            *details[:4],
        ),
    )


def _once_a_rank(evidence: list[Evidence]) -> tuple[list[Evidence], dict[int, bool]]:
    """The evidence without dumps of a rank that another dump of the same rank and moment goes beyond.

    Also the ranks that have several dumps, and whether each dump says when its calls were made.
    """
    paths: dict[tuple[int, str], dict[str, int]] = {}
    for item in evidence:
        if isinstance(item, GroupProgress) and len(item.positions) == 1 and item.path:
            position = item.positions[0]
            reached = paths.setdefault((position.rank, item.moment), {})
            reached[item.path] = reached.get(item.path, 0) + (position.queued or 0)
    dropped = {
        (rank, path) for (rank, _), seen in paths.items() for path in seen if path != max(seen, key=lambda p: seen[p])
    }
    if not dropped:
        return evidence, {}
    kept = [item for item in evidence if _rank_and_path(item) not in dropped]
    doubled = sorted({rank for rank, _ in dropped})
    notes = [
        Reporter(rank=rank, state="duplicate", detail="It wrote several dumps; the one that goes furthest counts")
        for rank in doubled
    ]
    undated = {_rank_and_path(item) for item in evidence if isinstance(item, GroupProgress) and _without_times(item)}
    dated = {_rank_and_path(item) for item in evidence if isinstance(item, GroupProgress) and not _without_times(item)}
    known = dict.fromkeys(doubled, True)
    for (rank, _), seen in paths.items():
        if rank in known and len(seen) > 1:
            known[rank] = all((rank, path) in dated or (rank, path) not in undated for path in seen)
    return [*kept, *notes], known


def _without_times(item: GroupProgress) -> bool:
    return not any(position.remembered for position in item.positions)


def _of_several_dumps(finding: Finding, doubled: dict[int, bool]) -> Finding:
    """A finding that says which ranks had several dumps, and is less sure if they may be of two jobs."""
    if not doubled or finding.kind == "undetermined":
        return finding
    said = f"{listed(doubled)}: several dumps; of each rank the one that goes furthest counts"
    unsure = [rank for rank, dated in doubled.items() if not dated]
    if unsure:
        said += ". They do not say when their calls were made, so they may be of two jobs"
    return msgspec.structs.replace(
        finding,
        confidence=min(finding.confidence, 0.5) if unsure else finding.confidence,
        evidence=(*finding.evidence, said),
    )


def _rank_and_path(item: Evidence) -> tuple[int | None, str]:
    if isinstance(item, GroupProgress):
        return (item.positions[0].rank if len(item.positions) == 1 else None), item.path
    if isinstance(item, Transfer | TransferCount | Reporter | CollectiveRecord):
        return item.rank, item.path
    return None, item.path if isinstance(item, Unread) else ""
