"""PyTorch Flight Recorder dumps of torch 2.3 to 2.13: pickles and JSON, one file a rank.

What changed over the versions: the name of a group stands in `process_group` (name and purpose), `pg_name` or only
`pg_id`; the sequence number in `collective_seq_id` and `p2p_seq_id`, or in `seq_id` before there were two; the members
in `pg_config` as text or list; the newest numbers in `pg_status` under `pg_id`. The oldest dumps are a bare list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.errors import RecordError
from keepstep.intake.flight_batches import closes_batch
from keepstep.intake.flight_entries import entries_of, memberships_of, remembers_all
from keepstep.intake.flight_entry import Entry, Membership
from keepstep.intake.plain_json import items_of_torn_list, parsed_json
from keepstep.intake.plain_pickle import LONGEST_PICKLE_BYTES, read_plain_pickle
from keepstep.intake.reading import whole
from keepstep.records.evidence import (
    CollectiveRecord,
    Evidence,
    GroupProgress,
    Position,
    Reporter,
    ReporterState,
    Transfer,
    TransferCount,
    Unread,
)

__all__ = ["READER", "FlightRecorder"]

_REMEMBERED = 512
"""Finished collectives of a group whose signatures are kept, newest first; unfinished ones are all kept."""

_SHOWN = 4
"""Oldest unfinished operations that are passed on whole, with their stacks."""

_NAMES = re.compile(r"(?:^|[_.-])(?:dump|nccl_trace|comm_lib_trace|fr_trace|flight)", re.IGNORECASE)
_KEYS = (b"pg_config", b"profiling_name", b"collective_seq_id", b"pg_status")
_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)")
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_OLD_PICKLE = re.compile(rb"[(}\]cl]")


class FlightRecorder:
    """Reader of Flight Recorder dumps."""

    name = "PyTorch Flight Recorder dump"

    def recognises(self, path: Path, head: bytes) -> bool:
        """Any binary pickle (no other format of ours is one), and JSON with the keys of a dump."""
        if _PICKLE.match(head):
            return True
        if head.lstrip()[:1] in (b"{", b"["):
            return any(b'"' + key + b'"' in head for key in _KEYS)
        return bool(_NAMES.search(path.name) and _OLD_PICKLE.match(head) and b"\n" in head[:200])

    def read(self, path: Path) -> Iterator[Evidence]:
        """Whether the rank reported, where it is in each group, its unfinished transfers and oldest operations.

        Raises RecordError if it is no dump.
        """
        dump, complete = _load(path)
        memberships = memberships_of(dump)
        entries = entries_of(dump, memberships)
        rank = _rank(path, entries, memberships=memberships)
        if rank is None:
            yield Unread(path=str(path), why="neither its name nor its groups say which rank wrote this dump")
            return
        state: ReporterState = "present" if complete else "truncated"
        detail = f"{len(entries)} operations in it"
        if not entries and complete:
            state, detail = "empty", "The dump has no operations"
        yield Reporter(rank=rank, state=state, detail=detail, path=str(path))
        yield from _progress(rank, entries, memberships=memberships, path=str(path), complete=complete)
        yield from _transfers(rank, entries, from_start=remembers_all(dump), path=str(path))
        unfinished = sorted((entry for entry in entries if not entry.finished), key=lambda entry: entry.queued or 0.0)
        yield from (_record(rank, entry, path=str(path)) for entry in unfinished[:_SHOWN])


READER = FlightRecorder()


def _load(path: Path) -> tuple[dict[str, Any], bool]:
    """The dump as a dictionary, and whether it is complete."""
    content, complete = whole(path, limit=LONGEST_PICKLE_BYTES)
    if not content:
        raise RecordError("the file is empty", where=str(path))
    dump: Any
    if content.lstrip()[:1] in (b"{", b"[") and b'"' in content[:4096]:
        try:
            dump = parsed_json(content)
        except RecordError:
            dump, complete = {"entries": items_of_torn_list(content, "entries"), **_torn_config(content)}, False
    else:
        dump, whole_pickle = read_plain_pickle(content)
        complete = complete and whole_pickle
    if isinstance(dump, list):
        dump = {"entries": dump}
    if not complete and isinstance(dump, dict) and isinstance(dump.get("entries"), list):
        dump = {**dump, "entries": _whole_entries(dump["entries"])}
    if not isinstance(dump, dict) or not ({"entries", "pg_config", "pg_status"} & dump.keys()):
        raise RecordError("plain data, and no Flight Recorder dump", where=str(path))
    return dump, complete


def _whole_entries(entries: list[Any]) -> list[Any]:
    """The entries without a last one that was cut off: it has fewer fields than the others, or not those of its end."""
    if len(entries) > 1 and isinstance(entries[-1], dict) and isinstance(entries[0], dict):
        return entries[:-1] if len(entries[-1]) < len(entries[0]) else entries
    return entries if entries and isinstance(entries[-1], dict) and {"state", "retired"} <= entries[-1].keys() else []


def _torn_config(content: bytes) -> dict[str, Any]:
    """`pg_config` and `pg_status` of JSON that is damaged somewhere else."""
    found = {}
    for key in ("pg_config", "pg_status"):
        at = content.find(b'"' + key.encode() + b'"')
        opening = content.find(b"{", at) if at >= 0 else -1
        values = items_of_torn_list(b'"x":[' + content[opening:], "x") if opening >= 0 else []
        if values:
            found[key] = values[0]
    return found


def _rank(path: Path, entries: list[Entry], *, memberships: dict[str, Membership]) -> int | None:
    """The rank of a dump: the number in the name of the file, checked against (or found from) its groups."""
    possible: set[int] | None = None
    for membership in memberships.values():
        if membership.ranks:
            possible = set(membership.ranks) if possible is None else possible & set(membership.ranks)
    numbers = _NUMBER.findall(path.name.split(".")[0]) or _NUMBER.findall(path.name)
    after_word = re.search(r"rank[_-]?(\d{1,7})(?!\d)", path.name, re.IGNORECASE)
    named = int(after_word[1]) if after_word else int(numbers[-1]) if numbers else None
    if named is not None and (not possible or named in possible):
        return named
    if possible is not None and len(possible) == 1:
        return possible.pop()
    own = {entry.own_end for entry in entries if entry.own_end is not None}
    return own.pop() if len(own) == 1 else None


def _progress(
    rank: int, entries: list[Entry], *, memberships: dict[str, Membership], path: str, complete: bool
) -> Iterator[GroupProgress]:
    """Progress in each group. Where the dump is cut off before its newest entries, how far it is stays unknown."""
    by_group: dict[str, list[Entry]] = {}
    mixed = set()
    for entry in entries:
        if entry.point_to_point:
            mixed.add(entry.group)
        else:
            by_group.setdefault(entry.group, []).append(entry)
    backends = {entry.group: entry.backend for entry in entries}
    everywhere = set(backends.values())
    for name, membership in memberships.items():
        gloo = (backends[name] == "gloo") if name in backends else everywhere == {"gloo"}
        mine = by_group.get(name, [])
        if not mine and (membership.queued is None or name in mixed):
            continue
        counts = name not in mixed and membership.queued is not None
        position = _position(rank, mine, membership=membership, counts=counts)
        if not complete and not counts:
            position = Position(rank=rank, signatures=position.signatures, remembered=position.remembered)
        yield GroupProgress(
            group=name,
            ranks=membership.ranks,
            positions=(position,),
            description=membership.description,
            by_device=not gloo,
            failed_counts=gloo,
            path=path,
        )


def _position(rank: int, entries: list[Entry], *, membership: Membership, counts: bool) -> Position:
    """Where the rank is in one group. `counts`: whether `pg_status` counts collectives only."""
    sequences = [entry.sequence for entry in entries]
    unfinished = [entry for entry in entries if not entry.finished]
    oldest = min(unfinished, key=lambda entry: entry.sequence, default=None)
    queued = max(sequences) if sequences else membership.queued
    finished = membership.finished
    if counts and membership.queued is not None:
        queued = max(membership.queued, queued or 0)
    if oldest is not None:
        finished = oldest.sequence - 1
    elif sequences:
        finished = max(sequences)
        if counts and membership.finished is not None:
            finished = max(finished, membership.finished)
    started = [entry.sequence for entry in entries if entry.started or entry.finished]
    dated = [(entry.sequence, entry.queued) for entry in entries if entry.queued is not None]
    newest = sorted(entries, key=lambda entry: (not entry.finished, entry.sequence))[-_REMEMBERED - len(unfinished) :]
    return Position(
        rank=rank,
        queued=queued,
        started=max(started, default=None),
        finished=finished,
        signatures={
            entry.sequence: entry.signature for entry in newest if entry.signature.op and not closes_batch(entry)
        },
        waiting_since=oldest.queued if oldest is not None else None,
        remembered=(min(dated), max(dated)) if dated else (),
    )


def _transfers(rank: int, entries: list[Entry], *, from_start: bool, path: str) -> Iterator[Transfer | TransferCount]:
    """The unfinished transfers, oldest first, and how many of each pair are finished."""
    numbers: Counter[tuple[str, tuple[int, int]]] = Counter()
    finished: Counter[tuple[str, tuple[int, int]]] = Counter()
    waiting = []
    for entry in entries:
        if not entry.point_to_point or entry.ends is None:
            continue
        pair = entry.group, entry.ends
        numbers[pair] += 1
        if entry.finished:
            finished[pair] += 1
        else:
            waiting.append((entry, numbers[pair] if from_start else None))
    for entry, ordinal in sorted(waiting, key=lambda item: item[0].queued or 0.0):
        assert entry.ends is not None
        yield Transfer(
            rank=rank,
            source=entry.ends[0],
            destination=entry.ends[1],
            group=entry.group,
            sequence=entry.sequence,
            queued=entry.queued,
            ordinal=ordinal,
            path=path,
        )
    for (group, (source, destination)), count in finished.items():
        yield TransferCount(
            rank=rank,
            source=source,
            destination=destination,
            group=group,
            finished=count,
            from_start=from_start,
            path=path,
        )


def _record(rank: int, entry: Entry, *, path: str) -> CollectiveRecord:
    return CollectiveRecord(
        rank=rank,
        group=entry.group,
        sequence=entry.sequence,
        signature=entry.signature,
        ranks=entry.ranks,
        description=entry.description,
        point_to_point=entry.point_to_point,
        source=entry.ends[0] if entry.ends else None,
        destination=entry.ends[1] if entry.ends else None,
        state="started" if entry.started else "scheduled",
        queued=entry.queued,
        timeout_s=entry.timeout_s,
        stack=entry.stack,
        path=path,
    )
