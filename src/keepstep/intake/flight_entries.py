"""The entries of a Flight Recorder dump, brought from the field names of every version to one form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from keepstep.intake.flight_batches import batches_joined
from keepstep.intake.flight_entry import Entry, Membership
from keepstep.records.evidence import Frame, Signature

__all__ = ["entries_of", "memberships_of", "remembers_all"]

_MOST_ENTRIES = 2_000_000
_MOST_FRAMES = 64
_LONGEST_NAME = 200
_LARGEST_TIME = 1 << 64
_WRAP = 1 << 31
_ENDS = re.compile(r"(send|recv)\s+(-?\d+)\s*(?:->|<-)\s*(-?\d+)")


def memberships_of(dump: dict[str, Any]) -> dict[str, Membership]:
    """Groups by name, from `pg_config`, `pg_status` and the entries."""
    config, status = _dictionary(dump.get("pg_config")), _dictionary(dump.get("pg_status"))
    names = {key: _dictionary(value) for key, value in config.items() if key}
    name_of = _names_of_ids(dump, list(names), ids=list(status))
    purposes = dict(_group(entry) for entry in _dictionaries(dump.get("entries")))
    counts = {name_of[key]: _dictionary(value) for key, value in status.items() if key in name_of}
    found = {}
    for name in dict.fromkeys([*names, *name_of.values(), *purposes]):
        count = counts.get(name, {})
        queued = _whole(count.get("last_enqueued_collective"))
        finished = _whole(count.get("last_completed_collective"))
        known = queued is not None and queued >= 0 and finished is not None  # a dump may be cut off between the two
        found[name] = Membership(
            ranks=_ranks(names.get(name, {}).get("ranks")),
            description=_text(names.get(name, {}).get("desc", "")) or purposes.get(name, ""),
            queued=queued if known else None,
            finished=finished if known else None,
        )
    return found


def entries_of(dump: dict[str, Any], memberships: dict[str, Membership]) -> list[Entry]:
    """All entries that are whole, in the order of the dump; those of a batch with what is known of all of it."""
    entries = _dictionaries(dump.get("entries"))
    found = (_entry(entry, memberships) for entry in entries)
    whole = _unwrapped([entry for entry in found if entry is not None])
    return batches_joined(whole, lanes=any("is_p2p" in entry for entry in entries[:1]))


def _unwrapped(entries: list[Entry]) -> list[Entry]:
    """The entries in one order: where numbers of a group began again behind 32 bits, the new ones are put behind."""
    top: dict[tuple[str, bool], int] = {}
    for entry in entries:
        lane = entry.group, entry.point_to_point
        top[lane] = max(top.get(lane, 0), entry.sequence)
    wrapped = {lane for lane, highest in top.items() if _WRAP < highest < 2 * _WRAP}
    return [
        replace(entry, sequence=entry.sequence + 2 * _WRAP)
        if (lane := (entry.group, entry.point_to_point)) in wrapped and top[lane] - entry.sequence > _WRAP
        else entry
        for entry in entries
    ]


def remembers_all(dump: dict[str, Any]) -> bool:
    """Whether the entries go back to the first operation of the process: the ring has not lost any."""
    entries = _dictionaries(dump.get("entries"))
    return bool(entries) and _whole(entries[0].get("record_id")) == 0


def _names_of_ids(dump: dict[str, Any], names: list[str], *, ids: list[str]) -> dict[str, str]:
    """Which group each `pg_id` is: from the entries; else by the order in which both count up, if that agrees."""
    known: dict[str, str] = {}
    for entry in _dictionaries(dump.get("entries")):
        if "pg_id" in entry:
            known[_text(entry["pg_id"])] = _group(entry)[0]
    if len(names) == len(ids) and all(item.isdecimal() for item in (*names, *ids)):
        by_order = dict(zip(sorted(ids, key=int), sorted(names, key=int), strict=True))
        if all(by_order.get(key) == name for key, name in known.items()):
            return by_order
    return known


def _entry(entry: dict[Any, Any], memberships: dict[str, Membership]) -> Entry | None:
    group, purpose = _group(entry)
    name = _text(entry.get("profiling_name", "")).split(":", 1)[-1]
    ends = _ENDS.search(name)
    point_to_point = bool(entry.get("is_p2p", ends is not None))
    sequence = _sequence(entry, point_to_point)
    if sequence is None:
        return None
    membership = memberships.get(group, Membership())
    state = _text(entry.get("state", ""))
    queued = _seconds(entry.get("time_created_ns"), 1e9) or _seconds(entry.get("time_created_us"), 1e6)
    timeout = _seconds(entry.get("timeout_ms"), 1e3)
    backend = _text(entry.get("profiling_name", "")).split(":", 1)[0]
    finished = _is_finished(entry, state, backend=backend)
    pair = _pair(ends, membership.ranks)
    return Entry(
        group=group,
        sequence=sequence,
        signature=_signature(entry, name.split(" ")[0]),
        ranks=membership.ranks,
        description=membership.description or purpose,
        point_to_point=point_to_point,
        ends=pair,
        own_end=None if pair is None or ends is None else pair[0] if ends[1] == "send" else pair[1],
        finished=finished,
        started=state == "started" or bool(entry.get("time_discovered_started_ns")),
        queued=queued,
        timeout_s=timeout,
        stack=() if finished else _stack(entry.get("frames")),
        backend=backend,
    )


def _is_finished(entry: dict[Any, Any], state: str, *, backend: str) -> bool:
    """Whether the operation is over. NCCL sets the state; Gloo only takes the entry back when it is done (`retired`).

    With NCCL `retired` alone may mean that the operation failed. JSON writes 0 for a time that is not known.
    """
    if state == "completed" or entry.get("time_discovered_completed_ns"):
        return True
    return bool(entry.get("retired")) and "nccl" not in backend


def _group(entry: dict[Any, Any]) -> tuple[str, str]:
    """Name and purpose of the group of an entry."""
    group = entry.get("process_group", entry.get("pg_name"))
    if isinstance(group, list | tuple) and group:
        return _text(group[0]), _text(group[1]) if len(group) > 1 and group[1] != "undefined" else ""
    if group is None:
        group = entry.get("pg_id", "0")
    return _text(group), _text(entry.get("pg_desc", ""))


def _sequence(entry: dict[Any, Any], point_to_point: bool) -> int | None:
    wanted = "p2p_seq_id" if point_to_point else "collective_seq_id"
    for key in (wanted, "seq_id"):
        value = _whole(entry.get(key))
        if value is not None and value >= 0:
            return value
    return None


def _pair(ends: re.Match[str] | None, ranks: tuple[int, ...]) -> tuple[int, int] | None:
    """Global ranks of (sender, receiver); the name gives the places in the group, and its first end is the writer."""
    if ends is None:
        return None
    writer, other = int(ends[2]), int(ends[3])
    source, destination = (writer, other) if ends[1] == "send" else (other, writer)
    if ranks and not (0 <= source < len(ranks) and 0 <= destination < len(ranks)):
        return None
    ordered = sorted(ranks)
    return (ordered[source], ordered[destination]) if ranks else (source, destination)


def _signature(entry: dict[Any, Any], op: str) -> Signature:
    sizes = _shapes(entry.get("input_sizes")) or _shapes(entry.get("output_sizes"))
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or ()
    dtype = _text(dtypes[0]) if isinstance(dtypes, list | tuple) and dtypes else _text(dtypes or "")
    return _same_signature(op[:_LONGEST_NAME], dtype, sizes=sizes)


@lru_cache(maxsize=4096)
def _same_signature(op: str, dtype: str, *, sizes: tuple[tuple[int, ...], ...]) -> Signature:
    """One object for equal signatures: a job has few, and a dump names them thousands of times."""
    return Signature(op=op, dtype=dtype, sizes=sizes)


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        return ()
    shapes = [shape for shape in value[:64] if isinstance(shape, list | tuple)]
    return tuple(tuple(size for size in shape[:16] if isinstance(size, int)) for shape in shapes)


def _stack(frames: Any) -> tuple[Frame, ...]:
    if not isinstance(frames, list | tuple):
        return ()
    return tuple(
        Frame(_text(frame.get("name", "")), _text(frame.get("filename", "")), _whole(frame.get("line")))
        for frame in frames[:_MOST_FRAMES]
        if isinstance(frame, dict)
    )


def _ranks(value: Any) -> tuple[int, ...]:
    """Ranks of a group: a list, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if len(value) < 1 << 20 else []
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list | tuple):
        return ()
    return tuple(sorted({rank for rank in value if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0}))


def _dictionaries(value: Any) -> list[dict[Any, Any]]:
    """The dictionaries in a list; nothing if it is none."""
    return [item for item in value[:_MOST_ENTRIES] if isinstance(item, dict)] if isinstance(value, list | tuple) else []


def _dictionary(value: Any) -> dict[str, Any]:
    return {_text(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """Text of a name; numbers are written out, containers give nothing."""
    return str(value)[:_LONGEST_NAME] if isinstance(value, str | int | float) else ""


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 30:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any, unit: float) -> float | None:
    return float(value) / unit if isinstance(value, int | float) and 0 < value < _LARGEST_TIME else None
