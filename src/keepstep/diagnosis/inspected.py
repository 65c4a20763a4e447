"""Collectives with their durations, as NCCL Inspector writes them: who comes late, which communicator is slow.

Inspector measures the kernel of a collective, in which the early ranks wait: who spends least time in it comes last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np

from keepstep.diagnosis.stragglers import diagnose_tables
from keepstep.records.evidence import CollectiveRecord, GroupProgress, Position
from keepstep.records.finding import Finding, Suspect
from keepstep.records.timing_table import TimingTable

__all__ = ["diagnose_inspected", "inspected_progress", "lone_finding"]

_FEWEST = 8
"""Collectives of a kind that are compared."""
_SLOW = 1.5

_Series = dict[tuple[str, str], dict[int, list[CollectiveRecord]]]


def inspected_progress(records: Iterable[CollectiveRecord], *, torn: Collection[str] = ()) -> tuple[GroupProgress, ...]:
    """How far each rank came in each communicator and kind; a snapshot, in global ranks.

    Of files that are cut off (`torn`) it is not known.
    """
    found = []
    for (group, op), members in _series(record for record in records if record.path not in torn).items():
        positions = tuple(
            Position(rank=rank, queued=max(record.sequence for record in mine)) for rank, mine in members.items()
        )
        found.append(
            GroupProgress(group=group, ranks=tuple(sorted(members)), positions=positions, kinds=op, snapshot=True)
        )
    return tuple(found)


def diagnose_inspected(records: Iterable[CollectiveRecord]) -> tuple[Finding, ...]:
    """Findings about slow ranks and slow communicators; empty if there are none."""
    series = _series(records)
    found: dict[object, Finding] = {}
    for (group, op), members in series.items():
        table = _table(members)
        if len(members) < 2 or table is None:
            continue
        for finding in diagnose_tables([table]):
            if finding.suspects and finding.suspects not in found:
                evidence = (f"communicator {group}, {op}, {len(members)} ranks", *finding.evidence)
                found[finding.suspects] = _with_evidence(finding, evidence)
    return tuple(found.values()) or tuple(_slow_communicators(series))


def lone_finding(records: Iterable[CollectiveRecord]) -> Finding | None:
    """That nothing can be compared: of no communicator of several ranks are there records of two."""
    heard: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for record in records:
        if record.duration_s is not None and len(record.ranks) != 1:
            heard[record.group].add(record.rank)
            sizes[record.group] = max(sizes.get(record.group, 0), len(record.ranks))
    if not heard or any(len(ranks) > 1 for ranks in heard.values()):
        return None
    group = max(sizes, key=lambda name: sizes[name])
    (rank,), size = heard[group], sizes[group]
    whole = f" of {size}" if size else ""
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(
            f"only rank {rank}{whole} of communicator {group} is here: its times say nothing "
            "without those of the others",
        ),
        next_probe="NCCL Inspector output of the other ranks",
    )


def _with_evidence(finding: Finding, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        kind=finding.kind,
        layer=finding.layer,
        suspects=finding.suspects,
        victims=finding.victims,
        confidence=finding.confidence - 0.1,
        evidence=evidence,
        next_probe=finding.next_probe,
    )


def _series(records: Iterable[CollectiveRecord]) -> _Series:
    """Records by communicator and kind, then by global rank: the one a process has in its largest group."""
    kept = [record for record in records if record.duration_s is not None]
    world: dict[tuple[str, str], tuple[int, int]] = {}
    for record in kept:
        process = record.path, record.process
        world[process] = max(world.get(process, (0, -1)), (len(record.ranks), record.rank))
    series: _Series = defaultdict(lambda: defaultdict(list))
    for record in kept:
        rank = world[record.path, record.process][1] if record.path else record.rank
        series[(record.group, record.signature.op)][rank].append(record)
    return series


def _table(members: dict[int, list[CollectiveRecord]]) -> TimingTable | None:
    """Durations of the collectives that all members recorded; None if they are few."""
    common = set.intersection(*({record.sequence for record in mine} for mine in members.values()))
    if len(common) < _FEWEST:
        return None
    rows = [
        (rank, record.sequence, record.duration_s)
        for rank, mine in members.items()
        for record in mine
        if record.sequence in common
    ]
    who, step, seconds = (np.array(column) for column in zip(*rows, strict=True))
    return TimingTable("communication", who.astype(np.int64), step.astype(np.int64), seconds.astype(np.float64))


def _slow_communicators(series: _Series) -> list[Finding]:
    """Communicators that take far longer than others of their size for the same operation and bytes."""
    levels: dict[tuple[str, int, int | None], dict[str, tuple[float, list[int]]]] = defaultdict(dict)
    for (group, op), members in series.items():
        sizes: dict[int | None, list[float]] = defaultdict(list)
        for mine in members.values():
            for record in mine:
                sizes[record.signature.count].append(record.duration_s or 0.0)
        for count, durations in sizes.items():
            if len(durations) >= _FEWEST:
                levels[(op, len(members), count)][group] = (float(np.median(durations)), sorted(members))
    found: dict[str, Finding] = {}
    for (op, size, count), groups in levels.items():
        if len(groups) < 3:
            continue
        usual = float(np.median([level for level, _ in groups.values()]))
        for group, (level, ranks) in groups.items():
            if usual > 0 and level >= _SLOW * usual and group not in found:
                found[group] = Finding(
                    kind="communication_slow",
                    group=group,
                    suspects=(tuple(Suspect(rank=rank) for rank in ranks),),
                    confidence=0.55,
                    evidence=(
                        f"{op} of {count} bytes in communicator {group} takes {level / usual:.2f} times as long as in "
                        f"{len(groups) - 1} others of {size} ranks; its members take equally long",
                    ),
                    next_probe="transfers between each pair of these ranks: which link is slow?",
                )
    return list(found.values())
