"""The journal of a keepstep run, with the recorder rings kept at each incident, as rows of the fleet's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from keepstep.errors import RecordError, TornRecord
from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.records.drills import may_cost
from keepstep.records.events import (
    DrillRecord,
    Event,
    FactRecord,
    Finding,
    Incident,
    JobEnded,
    JobStarted,
    OrderRecord,
    StepProgress,
)
from keepstep.records.journal_line import decode_lines
from keepstep.records.messages import Fence, FirstStep, MemberStarted, Restore
from keepstep.records.operations import OPERATIONS
from keepstep.records.ring import OpSlot, Ring, SlotStatus

__all__ = ["RUN_PARTITION", "RunNotes", "read_run"]

RUN_PARTITION = "keepstep-run"
"""Partition of attempts that only a journal tells of."""
_PHASES = ("detected", "decided", "fenced", "standby_chosen", "warmed", "connected", "copied", "joined")
_PEER_TO_PEER = 10
_MAX_EVENTS = 5_000_000


class RunNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside a journal: fields of run.json, the recorder rings of each incident by number, and whether
    the job still runs.
    """

    run: Mapping[str, Any] = {}
    rings: Mapping[int, Sequence[Ring]] = {}
    running: bool = False


def read_run(lines: Iterable[bytes], *, notes: RunNotes, cluster: str, where: str) -> Taken:
    """Incidents, progress and the attempts of one run.

    A torn last line is left out. Raises RecordError for a journal that is damaged in the middle.
    """
    events: list[Event] = []
    aside: list[Aside] = []
    try:
        for event in decode_lines(lines, where=where):
            events.append(event)
            if len(events) > _MAX_EVENTS:
                raise RecordError(f"a journal of more than {_MAX_EVENTS} records", where=where)
    except TornRecord as error:
        aside.append(Aside(len(events) + 1, f"the journal ends in mid-record: {error.what}", ""))
    job = next((event.job for event in events if event.job), "")
    scheduler = str(notes.run.get("scheduler_job") or "")
    common = {"cluster": cluster, "job": job, "scheduler_job": scheduler}
    incidents = [{**common, **row} for row in _incidents(events, notes.rings)]
    progress = [{**common, **row} for row in _progress(events)]
    attempts = [] if scheduler else _attempts(events, notes, cluster=cluster or "keepstep")
    return Taken(
        taken_rows("attempts", attempts),
        None,
        tuple(aside),
        tables={
            "incidents": taken_rows("incidents", incidents, key=("job", "attempt", "number", "kind", "onset")),
            "progress": taken_rows("progress", progress),
        },
    )


def _us(seconds: float | None) -> int | None:
    return None if not seconds else round(seconds * 1e6)


def _length(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _incidents(events: list[Event], rings: Mapping[int, Sequence[Ring]]) -> list[dict[str, Any]]:
    """Repairs with what the rings saw, and findings that belong to no repair."""
    rows = []
    findings = _told_once([event for event in events if isinstance(event, Finding)])
    drills = [event for event in events if isinstance(event, DrillRecord) and event.wall and may_cost(event.fault)]
    for incident in (event for event in events if isinstance(event, Incident)):
        own = [one for one in findings if _belongs(one, incident)]
        findings = [one for one in findings if one not in own]
        drill = incident.injected is not None or any(
            one.rank == incident.rank and -1 <= incident.onset_wall - one.wall <= 30 for one in drills
        )
        row, seen = _repair(incident, own), _waited(rings.get(incident.number, ()))
        evidence = "\n".join(part for part in (seen.get("evidence"), row["evidence"]) if part)
        path = {"link": row["link"] or seen.get("link", "")}
        rows.append(row | seen | _orders(events, incident) | path | {"drill": drill, "evidence": evidence})
    for finding in findings:
        if finding.kind != "healthy":
            rows.append(_finding(finding))
    return rows


def _told_once(findings: list[Finding]) -> list[Finding]:
    """One record for each finding: what was said of it last, at the time it was first named."""
    told: dict[tuple[int, int], Finding] = {}
    for place, finding in enumerate(findings):
        key = (finding.number, 0) if finding.number else (0, place)
        first = told.get(key)
        told[key] = finding if first is None else msgspec.structs.replace(finding, wall=first.wall, step=first.step)
    return list(told.values())


def _belongs(finding: Finding, incident: Incident) -> bool:
    near = incident.onset_wall - 600 <= finding.wall <= max(incident.wall, incident.onset_wall) + 60
    return near and (finding.rank in (None, incident.rank) or finding.kind == incident.kind)


def _repair(incident: Incident, findings: list[Finding]) -> dict[str, Any]:
    evidence = [line for finding in findings for line in finding.evidence]
    layer = next((finding.layer for finding in findings if finding.layer != "undetermined"), "undetermined")
    probe = next((finding.next_probe for finding in findings if finding.next_probe), "")
    return {
        "attempt": incident.attempt or 0,
        "number": incident.number,
        "kind": incident.kind,
        "layer": layer,
        "rank": incident.rank,
        "node": incident.node,
        "device": incident.device,
        "group": incident.group or next((finding.group for finding in findings if finding.group), None),
        "sequence": incident.sequence,
        "step": incident.step,
        "generation": incident.generation,
        "link": incident.link or incident.path or next((_path(finding) for finding in findings if _path(finding)), ""),
        "next_step": incident.step,
        "remedy": _remedy(incident) + (f"; probe: {probe}" if probe else ""),
        "onset": _us(incident.onset_wall or incident.wall),
        **{f"{phase}_us": _length(getattr(incident, phase)) for phase in _PHASES},
        "first_valid_us": _length(incident.first_valid_step),
        "steps_recomputed": incident.steps_recomputed,
        "bytes_moved": incident.bytes_moved,
        "members_changed": incident.members_changed,
        "evidence": "\n".join([*evidence, *([incident.note] if incident.note else [])]),
    }


def _remedy(incident: Incident) -> str:
    if incident.members_changed:
        return f"{incident.members_changed} members replaced, {incident.steps_recomputed} steps recomputed"
    return "nobody was lost: a false alarm" if incident.first_valid_step is not None else ""


def _path(finding: Finding) -> str:
    links = [f"{one.link[0]}->{one.link[1]}" for group in finding.suspects for one in group if one.link]
    return finding.path or finding.link or ",".join(links)


def _finding(finding: Finding) -> dict[str, Any]:
    ranks = [one.rank for group in finding.suspects for one in group if one.rank is not None]
    nodes = [one.node for group in finding.suspects for one in group if one.node]
    return {
        "attempt": finding.attempt or 0,
        "number": 0,
        "kind": finding.kind,
        "layer": finding.layer,
        "rank": finding.rank if finding.rank is not None else (ranks[0] if ranks else None),
        "node": finding.node or (nodes[0] if nodes else ""),
        "device": finding.device,
        "group": finding.group,
        "sequence": finding.sequence,
        "step": finding.step,
        "generation": finding.generation,
        "waiting": ",".join(map(str, finding.victims)),
        "link": _path(finding),
        "remedy": f"probe: {finding.next_probe}" if finding.next_probe else "",
        "onset": _us(finding.wall),
        "evidence": "\n".join(finding.evidence),
        "drill": False,
    }


def _orders(events: list[Event], incident: Incident) -> dict[str, Any]:
    """Who was excluded, and the first step after the change."""
    names: list[str] = []
    first: int | None = None
    for event in events:
        match event:
            case OrderRecord(order=Fence(), generation=generation, target=target) if generation == incident.generation:
                names.append(target)
            case FactRecord(fact=FirstStep(generation=now, version=version)) if now == incident.generation:
                first = version - 1 if first is None else min(first, version - 1)
    if incident.member and incident.members_changed:
        names.insert(0, f"{incident.member} (rank {incident.rank})")
    return {"excluded": ", ".join(dict.fromkeys(names))} | ({} if first is None else {"next_step": first})


def _waited(rings: Sequence[Ring]) -> dict[str, Any]:
    """The collective that was cut, who waited in it, and who had left it or never came."""
    cut = [(ring, slot) for ring in rings for slot in ring.operations if _cut(ring, slot)]
    if not cut:
        return {}
    ring, first = min(cut, key=lambda pair: pair[1].started_ns + pair[0].header.offset_ns)
    same = [(ring_, slot) for ring_, slot in cut if _key(slot) == _key(first)]
    waiting = sorted({ring_.header.rank for ring_, _ in same})
    others: dict[int, int] = {}
    for other in rings:
        done = [
            slot.sequence
            for slot in other.operations
            if slot.group_hash == first.group_hash
            and slot.generation == first.generation
            and slot.status is SlotStatus.DONE
            and slot.op < _PEER_TO_PEER
        ]
        if other.header.rank not in waiting and done:
            others[other.header.rank] = max(done)
    said = [f"rank {rank} had finished sequence {last}" for rank, last in sorted(others.items())]
    finished = [rank for rank, last in sorted(others.items()) if last >= first.sequence]
    absent = [rank for rank in sorted(others) if rank not in finished]
    words = [f"{','.join(map(str, finished))} (this one)"] if finished else []
    words += [f"{','.join(map(str, absent))} (the one before; never came to this one)"] if absent else []
    return {
        "op": OPERATIONS.get(first.op, str(first.op)),
        "group": ring.group_name(first.group_hash),
        "sequence": first.sequence,
        "step": first.step,
        "waiting": ",".join(map(str, waiting)),
        "finished": "; ".join(words),
        **_path_waited(same, absent),
        "evidence": "\n".join(said),
    }


def _path_waited(cut: list[tuple[Ring, OpSlot]], absent: list[int]) -> dict[str, Any]:
    """The directed links on which nothing came from a rank that was missing."""
    dry = {
        f"{peer.peer}->{ring.header.rank}"
        for ring, slot in cut
        for peer in slot.peers
        if peer.peer in absent and peer.wait_peer_ns > 0 and not peer.bytes_received
    }
    return {"link": ",".join(sorted(dry))} if dry else {}


def _cut(ring: Ring, slot: OpSlot) -> bool:
    return slot.op < _PEER_TO_PEER and slot.status is not SlotStatus.DONE and slot.started_ns > 0


def _key(slot: OpSlot) -> tuple[int, int, int]:
    return slot.group_hash, slot.generation, slot.sequence


def _progress(events: list[Event]) -> list[dict[str, Any]]:
    rows = []
    attempt = 0
    for event in events:
        attempt = event.attempt if event.attempt is not None else attempt
        what, step = "", None
        if isinstance(event, JobStarted):
            what = "started"
        elif isinstance(event, StepProgress):
            what, step = "step", event.step
        elif isinstance(event, JobEnded):
            what, step = "ended", event.steps_kept
        elif isinstance(event, OrderRecord) and isinstance(event.order, Restore):
            what, step = "restored", event.order.version
        if what and event.wall:
            rows.append(
                {
                    "attempt": attempt,
                    "time": _us(event.wall),
                    "what": what,
                    "step": step,
                    "step_us": _length(event.step_s) if isinstance(event, StepProgress) else None,
                    "members": event.members if isinstance(event, StepProgress) else None,
                    "standbys": event.standbys if isinstance(event, StepProgress) else None,
                }
            )
    return rows


def _attempts(events: list[Event], notes: RunNotes, *, cluster: str) -> list[dict[str, Any]]:
    """The run as one attempt, for fleets without a scheduler: one device a rank."""
    start = next((event for event in events if isinstance(event, JobStarted)), None)
    if start is None or not start.wall:
        return []
    end = next((event for event in reversed(events) if isinstance(event, JobEnded)), None)
    nodes = sorted(
        {event.fact.node for event in events if isinstance(event, FactRecord) and isinstance(event.fact, MemberStarted)}
    ) or sorted(start.nodes)
    last = max((event.wall for event in events if event.wall), default=start.wall)
    code = end.exit_code if end else None
    if end is not None:
        state = "COMPLETED" if code == 0 else "CANCELLED" if code in (130, 143) else "FAILED"
    else:
        state = "RUNNING" if notes.running else "FAILED"
    return [
        {
            "cluster": cluster,
            "job_id": start.job,
            "name": start.script.rsplit("/", 1)[-1],
            "partition": RUN_PARTITION,
            "state": state,
            "exit_code": code,
            "submit": _us(start.wall),
            "eligible": _us(start.wall),
            "start": _us(start.wall),
            "end": _us(end.wall if end else last) if not (end is None and notes.running) else None,
            "last_seen": _us(last),
            "gpus": start.world + start.standbys,
            "node_count": len(nodes) or None,
            "nodes": ",".join(nodes),
            "time_note": "" if end or notes.running else "the journal has no end: the last record is taken for it",
        }
    ]
