"""How far each rank is in its groups, as the lines of torch's watchdogs tell it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from keepstep.diagnosis.log_case import LogCase, rank_list
from keepstep.records.evidence import GroupProgress, LogEvent, Position, Signature

__all__ = ["HangReport", "hang_report"]

_DEFAULT = "0"


class HangReport(msgspec.Struct, frozen=True):
    """Who waits, who was named as missing, and the progress of groups of which something certain is known."""

    waiting: dict[int, LogEvent]
    """Ranks that timed out in a collective, with the line that says so."""
    named_missing: dict[int, LogEvent]
    """Ranks that a report of torch itself calls missing or behind."""
    groups: tuple[GroupProgress, ...]
    idle: frozenset[int]
    """Ranks that answered and have nothing unfinished."""


def hang_report(case: LogCase) -> HangReport:
    """What watchdogs, desync reports and monitored barriers say together."""
    waiting: dict[int, LogEvent] = {}
    for event in case.of("watchdog_timeout"):
        rank = _rank(event)
        if rank is not None:
            waiting.setdefault(rank, event)
    missing: dict[int, LogEvent] = {}
    for event in case.of("desync_never", "desync_behind", "barrier_missing"):
        for rank in rank_list(event.fields.get("ranks", "")):
            missing.setdefault(rank, event)
    missing = missing or _behind(case, waiting)
    positions = _positions(case)
    idle = frozenset(
        position.rank
        for ranks in positions.values()
        for position in ranks.values()
        if position.queued is not None and position.queued == position.finished and position.rank not in waiting
    )
    return HangReport(waiting, missing, tuple(_groups(case, positions)), idle)


def _behind(case: LogCase, waiting: dict[int, LogEvent]) -> dict[int, LogEvent]:
    """Ranks of a desync report that have not finished a collective, while all who timed out wait in a later one."""
    found: dict[int, LogEvent] = {}
    later = [
        int(event.fields["sequence"]) for event in waiting.values() if event.fields.get("sequence", "").isdecimal()
    ]
    for event in case.of("desync_waiting"):
        ranks = rank_list(event.fields.get("ranks", ""))
        if later and min(later) > int(event.fields["sequence"]) and not set(ranks) & set(waiting):
            found.update((rank, event) for rank in ranks if rank not in found)
    return found


def _rank(event: LogEvent) -> int | None:
    """Global rank of a line; a rank inside the group counts only if there is no other and the group is the world."""
    if event.rank is not None:
        return event.rank
    inner = event.fields.get("group_rank")
    return int(inner) if inner is not None and event.fields.get("group", _DEFAULT) == _DEFAULT else None


def _positions(case: LogCase) -> dict[str, dict[int, Position]]:
    """By group and rank: queued and finished numbers, and what the collective that timed out was."""
    found: dict[str, dict[int, Position]] = defaultdict(dict)
    alone = _alone(case)
    for event in case.of("group_status", "watchdog_timeout"):
        group = event.fields.get("group", _DEFAULT if alone else "")
        rank = _rank(event)
        if rank is None or not group or group.startswith("local "):
            continue
        before = found[group].get(rank, Position(rank=rank))
        found[group][rank] = (
            _with_status(before, event) if event.kind == "group_status" else _with_timeout(before, event)
        )
    return found


def _alone(case: LogCase) -> bool:
    """Whether lines without a group's name can be of one group: each rank times out once, in one collective."""
    seen: dict[int | None, set[str]] = defaultdict(set)
    for event in case.of("watchdog_timeout"):
        if "group" not in event.fields:
            seen[event.rank].add(event.fields.get("sequence", "?"))
    groups = {event.fields.get("group") for event in case.of("group_status")}
    return all(len(numbers) == 1 for numbers in seen.values()) and groups <= {None, _DEFAULT}


def _with_status(before: Position, event: LogEvent) -> Position:
    def number(name: str) -> int | None:
        text = event.fields.get(name, "")
        return int(text) if text.lstrip("-").isdecimal() else None

    return msgspec.structs.replace(
        before, queued=number("queued"), started=number("started"), finished=number("finished")
    )


def _with_timeout(before: Position, event: LogEvent) -> Position:
    """The collective that timed out is queued and not finished. Without a number nothing can be compared."""
    text = event.fields.get("sequence", "")
    if not text.isdecimal():
        return before
    sequence = int(text)
    signatures = dict(before.signatures)
    if event.fields.get("op"):
        count = event.fields.get("numel_in", "")
        signatures[sequence] = Signature(op=event.fields["op"].lower(), count=int(count) if count.isdecimal() else None)
    return msgspec.structs.replace(
        before,
        queued=before.queued if before.queued is not None else sequence,
        finished=before.finished if before.finished is not None else sequence - 1,
        signatures=signatures,
    )


def _groups(case: LogCase, positions: dict[str, dict[int, Position]]) -> list[GroupProgress]:
    described = {
        event.fields["group"]: event.fields["description"]
        for event in case.of("group_status")
        if "description" in event.fields
    }
    world, _ = case.world()
    told = {event.rank for event in case.of("group_status")}
    found = []
    for group, ranks in positions.items():
        usable = tuple(position for position in ranks.values() if position.queued is not None)
        members = sorted(ranks)
        whole = group == _DEFAULT and world is not None and world <= 100_000 and max(members, default=0) < world
        if whole and world is not None:
            members = list(range(world))
        if len(usable) > 1:
            found.append(
                GroupProgress(
                    group=group,
                    ranks=tuple(members),
                    positions=usable,
                    description=described.get(group, ""),
                    members_known=whole and told >= set(members),
                )
            )
    return found
