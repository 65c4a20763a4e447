"""What a run directory of keepstep tells a diagnosis: findings and incidents of its journal, and its rings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from keepstep.errors import KeepstepError
from keepstep.records.events import Event, FactRecord
from keepstep.records.evidence import Evidence, GroupProgress, LogEvent, Position, Transfer, TransferCount, Unread
from keepstep.records.finding import Finding, Suspect
from keepstep.records.incident import PHASES, Incident
from keepstep.records.lifecycle import JobEnded, JobStarted, StepProgress
from keepstep.records.messages import MemberExited, MemberStarted
from keepstep.records.ring import GroupState, decode_ring
from keepstep.service.bundles import BUNDLES_FOLDER, FINDING_FILE
from keepstep.service.ring_archive import INCIDENTS_FOLDER
from keepstep.service.run_directory import is_running
from keepstep.store.journal import JOURNAL_NAME, read_journal

__all__ = ["RING_READER", "RingReader", "ended_alone", "findings_of_run", "in_its_moment", "judged_moments"]

_LARGEST_RING = 1 << 30
_HEADER_BYTES = 8192
_BEGUN_BYTES = 64
"""What a member writes first when it begins to record."""
_NEWEST = 4096
_LARGEST_FINDING = 1 << 20
_MOVING = frozenset({"compute_slow", "communication_slow", "imbalance", "state_divergence", "healthy"})
"""Kinds of findings about a job that makes steps."""


class _Kind(msgspec.Struct):
    """All that is read of the finding of a bundle."""

    kind: str = ""


def findings_of_run(directory: Path) -> tuple[list[Finding], list[Unread]]:
    """The findings that the run itself wrote, one for each loss it repaired, and what of it could not be read.

    A run without any that blames is `healthy` if it ended well or still goes on.
    """
    try:
        events, _ = read_journal(directory)
    except KeepstepError as error:
        return [], [Unread(path=str(directory), why=error.what)]
    found = [*_written(events), *(_of_incident(event) for event in events if isinstance(event, Incident))]
    if all(finding.kind == "healthy" for finding in found):
        quiet = _quiet(events, running=is_running(directory))
        notes = tuple(line for finding in found for line in finding.evidence)
        found = [msgspec.structs.replace(quiet, evidence=(*quiet.evidence, *notes))]
    return found, []


def judged_moments(directory: Path) -> list[str]:
    """Folders with evidence of a run whose moment the run itself judged: it named who was at fault then."""
    try:
        events, _ = read_journal(directory)
    except KeepstepError:
        return []
    found = []
    for event in events:
        if isinstance(event, Incident) and (event.rank is not None or event.node):
            found.append(str(directory / INCIDENTS_FOLDER / str(event.number)))
        elif isinstance(event, Finding) and event.number and event.suspects:
            found.append(str(directory / BUNDLES_FOLDER / str(event.number)))
    return list(dict.fromkeys(found))


def ended_alone(directory: Path) -> list[LogEvent]:
    """For each rank of a script without keepstep's lines whose process ended with code 0, as its newest one: that it
    did. None where all ranks did."""
    try:
        events, _ = read_journal(directory)
    except KeepstepError:
        return []
    newest: dict[int, LogEvent | None] = {}
    for number, event in enumerate(events, 1):
        fact = event.fact if isinstance(event, FactRecord) else None
        if isinstance(fact, MemberStarted) and fact.rank >= 0:
            newest[fact.rank] = None
        elif isinstance(fact, MemberExited) and not (fact.code or fact.signal or fact.protected or fact.rank < 0):
            said = f"rank {fact.rank} ({fact.member}) exited with code 0"
            where = str(directory / JOURNAL_NAME)
            newest[fact.rank] = LogEvent(kind="process_done", path=where, line=number, text=said, rank=fact.rank)
    done = [event for event in newest.values() if event is not None]
    return done if len(done) < len(newest) else []


def _written(events: Iterable[Event]) -> list[Finding]:
    """Findings of the journal, each in its last state. What a probe left of one stands in its place."""
    latest: dict[object, Finding] = {}
    for index, event in enumerate(events):
        if isinstance(event, Finding):
            latest[event.number or ("unnumbered", index)] = event
    for number in reversed([number for number, finding in latest.items() if finding.refers in latest]):
        narrow = latest.pop(number)
        wide = latest[narrow.refers]
        told = wide if narrow.kind == "undetermined" else msgspec.structs.replace(narrow, refers=wide.refers)
        latest[narrow.refers] = msgspec.structs.replace(told, evidence=(*wide.evidence, *narrow.evidence))
    return [_past(finding) for finding in latest.values()]


def _past(finding: Finding) -> Finding:
    """A finding that has ended says so: it is what was, and not what is."""
    if finding.status != "ended" or any(line.startswith("ended: ") for line in finding.evidence):
        return finding
    return msgspec.structs.replace(finding, evidence=(*finding.evidence, "ended: it had passed before the run ended"))


def _of_incident(incident: Incident) -> Finding:
    """A loss that the run repaired, with the time it took."""
    reached = [phase for phase in PHASES if getattr(incident, phase) is not None]
    last = reached[-1] if reached else "onset"
    after = getattr(incident, last) or 0.0
    evidence = [f"incident {incident.number}: repaired up to `{last}`, {after:.3f} s after the onset"]
    if incident.injected is not None:
        evidence.append("a drill injected this fault on purpose")
    if incident.note:
        evidence.append(incident.note)
    suspect = Suspect(rank=incident.rank, node=incident.node)
    return Finding(
        kind=incident.kind,
        job=incident.job,
        suspects=((suspect,),) if incident.rank is not None or incident.node else (),
        evidence=tuple(evidence),
        rank=incident.rank,
        node=incident.node,
        next_probe="the log of this member in the run directory, and dmesg of its node",
    )


def _quiet(events: Iterable[Event], *, running: bool) -> Finding:
    started = ended = steps = None
    for event in events:
        if isinstance(event, JobStarted):
            started = event
        elif isinstance(event, JobEnded):
            ended = event
        elif isinstance(event, StepProgress):
            steps = event
    job = started.job if started else ""
    if ended is not None and ended.exit_code == 0:
        return Finding(kind="healthy", job=job, confidence=0.95, evidence=("the run ended well, without an incident",))
    if running and steps is not None:
        return Finding(kind="healthy", job=job, confidence=0.8, evidence=("the run goes on, without an incident",))
    why = "the journal has no end: the run was cut off"
    if ended is not None:
        why = f"the run ended with {ended.exit_code}: {ended.why}"
    return Finding(
        kind="undetermined",
        job=job,
        confidence=0.1,
        evidence=(why,),
        next_probe="the members' logs in the run directory",
    )


class RingReader:
    """Recorder rings as keepstep keeps them under incidents/."""

    @property
    def name(self) -> str:
        """What people call it."""
        return "keepstep ring"

    def recognises(self, path: Path, head: bytes) -> bool:
        """By the name; the decoder checks the content."""
        return path.suffix == ".ring"

    def read(self, path: Path) -> Iterator[Evidence]:
        """How far the member was in each of its groups. A file that is no ring raises RecordError.

        Counters begin anew in every generation, and each folder is of another moment: only rings of one folder and
        generation are compared.
        """
        with path.open("rb") as file:
            content = file.read(_LARGEST_RING + 1)
        if len(content) >= _HEADER_BYTES and not any(content[:_BEGUN_BYTES]):
            return  # of a process that recorded nothing: a plain script, a standby that never joined
        ring = decode_ring(content[:_LARGEST_RING], newest=_NEWEST)
        header = ring.header
        by_name: dict[str, GroupState] = {}
        for group in header.groups:
            if group.generation == header.generation and group.lane == 0:
                by_name.setdefault(group.name, group)
        for group in by_name.values():
            yield GroupProgress(
                group=group.name,
                ranks=(),
                positions=(
                    Position(rank=header.rank, queued=group.queued, started=group.started, finished=group.finished),
                ),
                size=group.size,
                by_device=False,
                moment=f"{path.parent}, generation {header.generation}",
                path=str(path),
            )


RING_READER = RingReader()


def in_its_moment(items: Iterable[Evidence], path: Path) -> Iterator[Evidence]:
    """The evidence of a file; dumps in a bundle are of the moment at which its finding was made.

    Rings, dumps and stacks of a finding with which training went on were taken from ranks on their way: that one of
    them is behind another says nothing, so only what could not be read is passed on.
    """
    bundled = path.parent.name.isdigit() and path.parent.parent.name == BUNDLES_FOLDER
    moving = bundled and _kind_of_bundle(path.parent) in _MOVING
    for item in items:
        if moving and not isinstance(item, Unread):
            continue
        if bundled and isinstance(item, GroupProgress | Transfer | TransferCount) and not item.moment:
            yield msgspec.structs.replace(item, moment=str(path.parent))
        else:
            yield item


def _kind_of_bundle(folder: Path) -> str:
    """The kind of the finding that a bundle belongs to; empty where the bundle does not say."""
    try:
        with (folder / FINDING_FILE).open("rb") as file:
            return msgspec.json.decode(file.read(_LARGEST_FINDING), type=_Kind).kind
    except (OSError, msgspec.DecodeError):
        return ""
