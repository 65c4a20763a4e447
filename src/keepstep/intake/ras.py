"""NCCL RAS reports (NCCL 2.24 and newer): the text of `ncclras`, and its JSON since 2.28.

RAS numbers ranks inside each communicator; the largest one is taken for the world, and processes (host, pid) lead from
the others to it. NCCL 2.28.9 writes `missing_ranks` without the comma before `"status"`; it is put there. A reply that
came over a raw socket may begin with the line `OK`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.errors import RecordError
from keepstep.intake.plain_json import parsed_json
from keepstep.intake.ras_text import text_evidence
from keepstep.intake.reading import whole
from keepstep.records.evidence import Evidence, GroupProgress, Place, Position, Reporter, ReporterState, Unread

__all__ = ["READER", "RasReport"]

_LONGEST_BYTES = 256 << 20
_JSON_KEYS = (b'"communicators"', b'"communicators_count"', b'"missing_ranks"', b"PEER_DEAD")
_TEXT = re.compile(
    rb"considered dead \(unreachable via the RAS network\)|launched up to operation|Missing communicator data from"
    rb"|Communicators\.\.\.|No communicator data collected|Group\s+Comms\s+Nodes\s+Ranks|PEER_DEAD:"
)
_MISSING_COMMA = re.compile(r'([\d"\]}]|true|false|null)([ \t]*\r?\n\s*)("[^"\n]*"\s*:)')
_LINE_OK = re.compile(rb"\A\s*OK\s*\r?\n")
_DONE, _IN_PROGRESS = 0, 7
"""ncclSuccess and ncclInProgress."""


class RasReport:
    """Reader of NCCL RAS reports."""

    name = "NCCL RAS report"

    def recognises(self, path: Path, head: bytes) -> bool:
        """JSON with communicators, or text with the headings of a report."""
        body = _LINE_OK.sub(b"", head).lstrip()
        if body[:1] == b"{":
            return any(key in body for key in _JSON_KEYS)
        return bool(_TEXT.search(body))

    def read(self, path: Path) -> Iterator[Evidence]:
        """Progress of the communicators, missing and dead processes. Raises RecordError if it is no RAS report."""
        content, complete = whole(path, limit=_LONGEST_BYTES)
        body = _LINE_OK.sub(b"", content).strip()
        if not complete:
            yield Unread(path=str(path), why="the compressed file is cut off; what was readable was read")
        if body[:1] == b"{":
            reports = _documents(body.decode("utf-8", "replace"), path)
            events = [report for report in reports if "event" in report]
            status = [report for report in reports if "event" not in report]
            for report in [*events, *status[-1:]]:
                standing = len(status) > 1 and _launches(status[-1]) == _launches(status[-2])
                yield from _json_evidence(report, str(path), standing=standing)
        elif _TEXT.search(body):
            yield from text_evidence(body.decode("utf-8", "replace"), str(path))
        else:
            raise RecordError("no NCCL RAS report", where=str(path))


READER = RasReport()


def _documents(text: str, path: Path) -> list[dict[str, Any]]:
    """The JSON reports in a file, newest last. Several may follow each other (one for each query)."""
    mended = _MISSING_COMMA.sub(r"\1,\2\3", text)
    pieces = re.split(r"(?<=\})\s*\n(?:OK\s*\n)?(?=\{)", mended)
    found = []
    for piece in pieces:
        value = parsed_json(piece.encode())
        if isinstance(value, dict):
            found.append(value)
    if not found:
        raise RecordError("no NCCL RAS report", where=str(path))
    return found


def _launches(report: dict[str, Any]) -> list[Any]:
    """What every rank has launched, to see whether a later report moved on."""
    communicators = _items(report.get("communicators"))
    return [[member.get("collective_counts") for member in _items(item.get("ranks"))] for item in communicators]


def _json_evidence(report: dict[str, Any], path: str, *, standing: bool) -> Iterator[Evidence]:
    """Records of one report. `standing`: the report before it had the same counts."""
    if report.get("event") == "PEER_DEAD":
        yield from _monitor_event(report, path)
        return
    communicators = [item for item in _items(report.get("communicators")) if isinstance(item, dict)]
    world = _world(communicators)
    for process, rank in world.items():
        yield Place(rank=rank, node=process[0], pid=process[1], device=process[2])
    seen: set[tuple[Any, ...]] = set()
    for communicator in communicators:
        yield from _progress(communicator, world, path=path, standing=standing)
        for member in _items(communicator.get("missing_ranks")):
            process = _process(member)
            if process not in seen:
                seen.add(process)
                yield _missing(member, world.get(process), path=path)
        for member in _items(communicator.get("ranks")):
            yield from _error(member, world.get(_process(member)), path=path)
    if not communicators:
        yield Unread(path=path, why="the RAS report names no communicator")


def _world(communicators: list[dict[str, Any]]) -> dict[tuple[str, int, str], int]:
    """Global rank by process, from the largest communicator."""
    if not communicators:
        return {}
    largest = max(communicators, key=lambda item: _number(item.get("size")) or 0)
    members = [*_items(largest.get("ranks")), *_items(largest.get("missing_ranks"))]
    return {_process(member): rank for member in members if (rank := _number(member.get("rank"))) is not None}


def _progress(
    communicator: dict[str, Any], world: dict[tuple[str, int, str], int], *, path: str, standing: bool
) -> Iterator[Evidence]:
    """One GroupProgress over all kinds of collectives, in global ranks; nothing if they are not known."""
    positions, unknown = [], 0
    for member in _items(communicator.get("ranks")):
        rank = world.get(_process(member))
        counts = member.get("collective_counts")
        if rank is None or not isinstance(counts, dict):
            unknown += 1
            continue
        launched = sum(value for value in counts.values() if isinstance(value, int) and value >= 0)
        positions.append(Position(rank=rank, queued=launched))
        yield Reporter(rank=rank, state="present", path=path)
    if unknown:
        yield Unread(
            path=path, why=f"{unknown} ranks of communicator {communicator.get('hash')} are not in the largest one"
        )
    absent = [world.get(_process(member)) for member in _items(communicator.get("missing_ranks"))]
    yield GroupProgress(
        group=str(communicator.get("hash", ""))[:64],
        ranks=tuple(sorted({*(item.rank for item in positions), *(rank for rank in absent if rank is not None)})),
        positions=tuple(positions),
        description="NCCL communicator",
        kinds="launches",
        snapshot=not standing,
        path=path,
    )


def _missing(member: dict[str, Any], rank: int | None, *, path: str) -> Reporter:
    status = _dictionary(member.get("status"))
    node, pid, device = _process(member)
    state: ReporterState = "absent"
    detail = "RAS got no answer from its process"
    if status.get("considered_dead") is True:
        state, detail = "dead", "RAS considers its process dead"
    elif status.get("unresponsive") is False:
        who = "a process" if rank is None else f"rank {rank}"
        state, detail = "unclear", f"{who} answers and has left a communicator that others have, or not yet joined it"
    return Reporter(state=state, rank=rank, node=node or None, pid=pid, device=device or None, detail=detail, path=path)


def _error(member: dict[str, Any], rank: int | None, *, path: str) -> Iterator[Reporter]:
    """A rank that reports an NCCL error of its own."""
    status = _dictionary(member.get("status"))
    for key in ("async_error", "init_state"):
        code = _number(status.get(key))
        if code is not None and code not in (_DONE, _IN_PROGRESS):
            node, pid, device = _process(member)
            yield Reporter(
                state="failed", rank=rank, node=node, pid=pid, device=device, detail=f"{key} {code}", path=path
            )


def _monitor_event(event: dict[str, Any], path: str) -> Iterator[Reporter]:
    peer = event.get("peer")
    if isinstance(peer, dict):
        devices = _items(peer.get("cuda_devs"), dict)
        yield Reporter(
            state="dead",
            node=str(peer.get("host"))[:200],
            pid=_number(peer.get("pid")),
            device=str(devices[0]) if devices else None,
            detail="RAS considers its process dead",
            path=path,
        )


def _process(member: dict[str, Any]) -> tuple[str, int, str]:
    device = member.get("nvml_dev", member.get("cuda_dev", ""))
    return str(member.get("host", ""))[:200], _number(member.get("pid")) or 0, str(device)[:20]


def _items(value: Any, unwanted: type = str) -> list[Any]:
    """The members of a list (dictionaries, unless `unwanted` is dict); nothing if it is none."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, dict) != (unwanted is dict)]


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
