"""Progress of groups, brought together: several reports of one group become one, and records become progress."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from keepstep.records.evidence import CollectiveRecord, GroupProgress, Position, Signature, Transfer

__all__ = ["WORLD", "is_rooted", "merged", "progress_of", "with_failed_open"]

WORLD = "default_pg"
"""What torch calls the group of all ranks."""
_MOST_RANKS = 1 << 20

_EARLY = ("broadcast", "reduce", "gather", "scatter")
"""Operations that one member may finish although others have not come."""

_WRAP = 1 << 31
"""Two counters of one group further apart than this: the smaller one has wrapped at 32 bits."""


def merged(groups: Iterable[GroupProgress]) -> tuple[GroupProgress, ...]:
    """One GroupProgress for each group (same name, same members, same kinds), in order of first appearance.

    If a rank appears more than once, its furthest numbers are kept and its signatures joined. Counters that wrapped
    at 32 bits are put behind the others. Where no report names the members, `ranks` stays empty, except for the world
    and for groups of whose members as many reported as they have.
    """
    named: dict[tuple[str, str], list[GroupProgress]] = defaultdict(list)
    for group in groups:
        named[(group.group, group.kinds)].append(group)
    return tuple(_joined(same) for reports in named.values() for same in _by_members(reports))


def with_failed_open(groups: Iterable[GroupProgress]) -> tuple[tuple[GroupProgress, ...], dict[int, str]]:
    """The groups with failed operations as unfinished ones, and of which group each rank's newest one failed.

    Gloo takes back an operation that failed like one that succeeded. None succeeds that a member did not call, so one
    that is finished on some members and not called on another has failed. Where nobody waits, nothing stands still.
    """
    given = tuple(groups)
    if not any(group.failed_counts and _waits(position) for group in given for position in group.positions):
        return given, {}
    failed: dict[int, str] = {}
    opened = []
    for group in given:
        reached = min((position.queued for position in group.positions if position.queued is not None), default=0)
        positions = []
        for position in group.positions:
            if group.failed_counts and position.finished == reached + 1 and not _may_end_early(position, reached + 1):
                position = msgspec.structs.replace(position, finished=reached)
                failed[position.rank] = group.group
            positions.append(position)
        opened.append(msgspec.structs.replace(group, positions=tuple(positions)))
    return tuple(opened), failed


def _waits(position: Position) -> bool:
    return position.queued is not None and position.finished is not None and position.queued > position.finished


def _may_end_early(position: Position, sequence: int) -> bool:
    """Whether the operation is one that a member may finish alone, or of an unknown kind."""
    signature = position.signatures.get(sequence)
    return signature is None or is_rooted(signature)


def is_rooted(signature: Signature) -> bool:
    """Whether one member may finish the operation although others have not come."""
    return signature.op.strip("_").startswith(_EARLY) and "reduce_scatter" not in signature.op


def _by_members(reports: list[GroupProgress]) -> list[list[GroupProgress]]:
    """Reports of groups with one name, parted by their members. Those that name no members join the others."""
    parts: dict[tuple[int, ...], list[GroupProgress]] = {}
    nameless = []
    for report in reports:
        if report.ranks:
            parts.setdefault(report.ranks, []).append(report)
        else:
            nameless.append(report)
    if not parts:
        return [nameless]
    for report in nameless:
        home = next((ranks for ranks in parts if {item.rank for item in report.positions} <= set(ranks)), None)
        parts[next(iter(parts)) if home is None else home].append(report)
    return list(parts.values())


def progress_of(records: Iterable[CollectiveRecord]) -> tuple[tuple[GroupProgress, ...], tuple[Transfer, ...]]:
    """Progress of the groups, and the point-to-point operations that are not finished, out of single records."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[CollectiveRecord]]] = defaultdict(
        lambda: defaultdict(list)
    )
    transfers = []
    for record in records:
        if not record.point_to_point:
            by_group[(record.group, record.ranks)][record.rank].append(record)
        elif record.state != "completed" and record.source is not None and record.destination is not None:
            transfers.append(_transfer(record, record.source, destination=record.destination))
    groups = [
        GroupProgress(
            group=name,
            ranks=ranks or tuple(sorted(members)),
            positions=tuple(_position(rank, mine) for rank, mine in members.items()),
            description=next(iter(members.values()))[0].description,
            members_known=bool(ranks),
        )
        for (name, ranks), members in by_group.items()
    ]
    return tuple(groups), tuple(transfers)


def _transfer(record: CollectiveRecord, source: int, *, destination: int) -> Transfer:
    return Transfer(
        rank=record.rank,
        source=source,
        destination=destination,
        group=record.group,
        sequence=record.sequence,
        queued=record.queued,
        path=record.path,
    )


def _position(rank: int, records: list[CollectiveRecord]) -> Position:
    """Where `rank` is, from its records of one group."""
    unfinished = [record for record in records if record.state in ("scheduled", "started")]
    finished = [record.sequence for record in records if record.state == "completed"]
    started = [record.sequence for record in records if record.state in ("started", "completed")]
    oldest = min(unfinished, key=lambda record: record.sequence, default=None)
    newest_finished = oldest.sequence - 1 if oldest is not None else max(finished, default=None)
    return Position(
        rank=rank,
        queued=max(record.sequence for record in records),
        started=max(started, default=None),
        finished=newest_finished,
        signatures={record.sequence: record.signature for record in records},
        waiting_since=oldest.queued if oldest is not None else None,
    )


def _joined(same: list[GroupProgress]) -> GroupProgress:
    positions: dict[int, Position] = {}
    for group in same:
        for position in group.positions:
            known = positions.get(position.rank)
            positions[position.rank] = position if known is None else _further(known, position)
    description = next((group.description for group in same if group.description), "")
    ranks = next((group.ranks for group in same if group.ranks), ())
    if not ranks and {group.size for group in same} == {len(positions)}:
        ranks = tuple(sorted(positions))
    named = bool(ranks)
    if not named and description == WORLD and positions:
        ranks = tuple(range(min(max(positions), _MOST_RANKS) + 1))
    return msgspec.structs.replace(
        same[0],
        ranks=ranks,
        positions=_unwrapped(tuple(positions.values())),
        description=description,
        members_known=named and all(group.members_known for group in same),
        by_device=all(group.by_device for group in same),
    )


def _further(one: Position, other: Position) -> Position:
    signatures: dict[int, Signature] = {**one.signatures, **other.signatures}
    return Position(
        rank=one.rank,
        queued=_larger(one.queued, other.queued),
        started=_larger(one.started, other.started),
        finished=_larger(one.finished, other.finished),
        signatures=signatures,
        waiting_since=one.waiting_since if other.waiting_since is None else other.waiting_since,
    )


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)


def _unwrapped(positions: tuple[Position, ...]) -> tuple[Position, ...]:
    """Positions whose small counters are lifted by 2**32 if others of the group are close below that."""
    top = max((position.queued for position in positions if position.queued is not None), default=0)
    if not _WRAP < top < 3 * _WRAP:
        return positions
    return tuple(
        position
        if position.queued is None or top - position.queued < _WRAP
        else msgspec.structs.replace(
            position,
            queued=position.queued + 2 * _WRAP,
            started=_lifted(position.started),
            finished=_lifted(position.finished),
            signatures={sequence + 2 * _WRAP: what for sequence, what in position.signatures.items()},
        )
        for position in positions
    )


def _lifted(sequence: int | None) -> int | None:
    if sequence is None or sequence > _WRAP:
        return sequence
    return sequence + 2 * _WRAP
