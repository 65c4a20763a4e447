"""NCCL Inspector output (`NCCL_INSPECTOR_ENABLE=1`): JSON objects, one for each collective of a communicator.

An object has `header` (communicator id, rank in it, its size), `metadata` (host, pid, time of the dump) and
`coll_perf` (operation, sequence number, bytes, microseconds), since format 4.1 also `p2p_perf`. Ranks are those of the
communicator; the largest communicator of a process is taken for the world. A file may hold what several processes
wrote.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.errors import RecordError
from keepstep.intake.plain_json import several_json
from keepstep.intake.reading import opened, whole
from keepstep.records.evidence import CollectiveRecord, Evidence, Place, Reporter, Signature, Unread

__all__ = ["READER", "Inspector"]

_KEYS = (b'"coll_perf"', b'"inspector_output_format_version"', b'"coll_exec_time_us"')
_LONGEST_WHOLE = 512 << 20
_LONGEST_LINE = 1 << 20
_MOST_RANKS = 1 << 20
_LARGEST_SEQUENCE = 1 << 62
_REMEMBERED = 5_000
"""Newest collectives of each kind, communicator and rank that are passed on."""


class Inspector:
    """Reader of NCCL Inspector output."""

    name = "NCCL Inspector output"

    def recognises(self, path: Path, head: bytes) -> bool:
        """JSON objects with the keys of the Inspector."""
        return head.lstrip()[:1] in (b"{", b"[") and any(key in head for key in _KEYS)

    def read(self, path: Path) -> Iterator[Evidence]:
        """A Place for each process, and its newest collectives. Raises RecordError if there are none."""
        newest: dict[tuple[str, int, str], deque[CollectiveRecord]] = {}
        torn = False
        for item in _objects(path):
            if isinstance(item, Unread):
                torn = True
                yield item
                continue
            record = _record(item, str(path))
            if record is None:
                continue
            key = (record.group, record.rank, record.signature.op)
            if key not in newest:
                newest[key] = deque(maxlen=_REMEMBERED)
                yield from _place(item, record)
            newest[key].append(record)
        if not newest:
            raise RecordError("no NCCL Inspector record in it", where=str(path))
        if torn:
            first = {records[0].process: rank for (_, rank, _), records in reversed(newest.items())}
            for rank in first.values():
                yield Reporter(rank=rank, state="truncated", detail="Lines are missing", path=str(path))
        for records in newest.values():
            yield from records


READER = Inspector()


def _objects(path: Path) -> Iterator[dict[str, Any] | Unread]:
    """The objects of a file: one a line (streamed), or spread over lines, or in a list."""
    with opened(path) as file:
        try:
            first = file.readline(_LONGEST_LINE)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            first = b""
    if first.rstrip().endswith(b"}"):
        yield from _lines(path)
        return
    content, complete = whole(path, limit=_LONGEST_WHOLE)
    if not complete:
        yield Unread(path=str(path), why="the compressed file is cut off; what was readable was read")
    for value in several_json(content):
        yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict))


def _lines(path: Path) -> Iterator[dict[str, Any] | Unread]:
    bad = 0
    with opened(path) as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line.decode("utf-8", "replace").strip().rstrip(","))
                except (ValueError, RecursionError):
                    bad += 1
                    continue
                if isinstance(value, dict):
                    yield value
        except (EOFError, gzip.BadGzipFile, zlib.error):
            yield Unread(path=str(path), why="the compressed file is cut off; what was readable was read")
    if bad:
        yield Unread(path=str(path), why=f"{bad} lines are no JSON (cut off or damaged)")


def _record(item: dict[str, Any], path: str) -> CollectiveRecord | None:
    header, perf = item.get("header"), item.get("coll_perf")
    if not isinstance(header, dict) or not isinstance(perf, dict):
        return None
    rank, sequence = header.get("rank"), perf.get("coll_sn")
    if not (isinstance(rank, int) and 0 <= rank < _MOST_RANKS):
        return None
    if not (isinstance(sequence, int) and abs(sequence) < _LARGEST_SEQUENCE):
        return None
    size = header.get("n_ranks")
    took = perf.get("coll_exec_time_us")
    metadata = _part(item, "metadata")
    written = metadata.get("dump_timestamp_us")
    bytes_moved = perf.get("coll_msg_size_bytes")
    return CollectiveRecord(
        rank=rank,
        group=str(header.get("id", ""))[:64],
        sequence=sequence,
        signature=Signature(
            op=str(perf.get("coll", ""))[:64], count=bytes_moved if isinstance(bytes_moved, int) else None
        ),
        ranks=_members(size) if isinstance(size, int) and 0 < size <= _MOST_RANKS else (),
        state="completed",
        duration_s=_seconds(took),
        finished=_seconds(written),
        process=_process(metadata),
        path=path,
    )


def _process(metadata: dict[str, Any]) -> str:
    """Host and number of a process in one word: one string for all of its records."""
    return sys.intern(f"{metadata.get('hostname', '')}:{metadata.get('pid', '')}"[:200])


def _seconds(microseconds: object) -> float | None:
    """Microseconds as seconds; None for what is no time."""
    if not isinstance(microseconds, int | float) or not 0 <= microseconds < _LARGEST_SEQUENCE:
        return None
    return float(microseconds) / 1e6


@lru_cache(maxsize=64)
def _members(size: int) -> tuple[int, ...]:
    """The ranks of a communicator, one object for all of its records."""
    return tuple(range(size))


def _place(item: dict[str, Any], record: CollectiveRecord) -> Iterator[Place]:
    metadata = _part(item, "metadata")
    host, pid = metadata.get("hostname"), metadata.get("pid")
    if isinstance(host, str):
        yield Place(rank=record.rank, node=host[:200], pid=pid if isinstance(pid, int) else None)


def _part(item: dict[str, Any], key: str) -> dict[str, Any]:
    value = item.get(key)
    return value if isinstance(value, dict) else {}
