"""`keepstep diagnose`: finds the inputs, asks the readers, runs the diagnosis, and puts the answers together."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from keepstep.diagnosis.dump_verdict import diagnose_dumps
from keepstep.diagnosis.jobs_apart import JobEvidence, jobs_apart
from keepstep.diagnosis.log_findings import diagnose_logs
from keepstep.diagnosis.log_hang import explained_by_logs
from keepstep.errors import KeepstepError, RecordError
from keepstep.intake.dumps import DUMP_READERS
from keepstep.intake.health_text import READER as HEALTH_READER
from keepstep.intake.log_text import READER as LOG_READER
from keepstep.intake.pasted_text import fenced_blocks
from keepstep.intake.plain_json import is_json_line, parsed_json
from keepstep.intake.reading import HEAD_BYTES, Reader, head_of, whole
from keepstep.intake.timings import READER as TIMINGS
from keepstep.intake.timings import without_times
from keepstep.records.evidence import Evidence, GroupProgress, LogEvent, StackSample, Transfer, TransferCount, Unread
from keepstep.records.finding import Finding, Suspect
from keepstep.records.finding_words import ranks_of
from keepstep.records.timing_table import TimingTable
from keepstep.service.diagnosis_inputs import find_inputs
from keepstep.service.run_evidence import RING_READER, ended_alone, findings_of_run, in_its_moment, judged_moments

__all__ = ["READERS", "Diagnosis", "as_json", "diagnose_paths"]

READERS: tuple[Reader, ...] = (RING_READER, *DUMP_READERS, HEALTH_READER, LOG_READER)
"""In the order in which they are asked; log text last, because nearly everything readable is text."""

_MOST_EVENTS = 1_000_000
_MOST_STACKS = 200_000
_MOST_RECORDS = 2_000_000
"""Everything else that is kept: progress of ranks, single collectives, tables."""
_MOST_TABLE_ROWS = 50_000_000
_MOST_IN_DOUBT = 0.6
"""Confidence where the files may be of two jobs."""
_LONGEST_JSON = 64 << 20
_TELL_BYTES = 64 << 20
_TELL_FILES = 500

_JSON = re.compile(rb'\s*(?:\{\s*["}]|\[\s*[\[{"])')
"""How JSON begins; a name in brackets begins many lines of logs."""

_Tell = Callable[[str], None]
_Item = TypeVar("_Item")


class Diagnosis(msgspec.Struct, frozen=True):
    """The answer: findings, the surest first; what was read, with its format; and what could not be read."""

    findings: tuple[Finding, ...]
    read: tuple[tuple[str, str], ...]
    unread: tuple[Unread, ...]

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if there are findings (`undetermined` is one)."""
        return 0 if all(finding.kind == "healthy" for finding in self.findings) else 1


def diagnose_paths(paths: list[Path], *, tell: _Tell = lambda _: None) -> Diagnosis:
    """Diagnose everything below `paths`: one job, or several if it cannot be one. `tell` is told about long work.

    Raises UsageError if a path does not exist or there is nothing to read, RecordError if nothing could be read.
    """
    inputs = find_inputs(paths)
    gathered = _Gathered(list(inputs.unread))
    for number, path in enumerate(inputs.files):
        if number and number % _TELL_FILES == 0:
            tell(f"{number} of {len(inputs.files)} files read")
        gathered.read_file(path, tell)
    by_run: dict[str, list[Finding]] = {}
    for directory in inputs.runs:
        found, unread = findings_of_run(directory)
        by_run[str(directory)] = found
        gathered.unread += unread
        if not unread:
            gathered.read.append((str(directory), "keepstep run directory"))
        gathered.leave_out(judged_moments(directory))
        gathered.events += ended_alone(directory)
    if not gathered.read:
        raise RecordError(
            f"nothing could be read: {gathered.unread[0].why}" if gathered.unread else "nothing could be read",
            where=gathered.unread[0].path if gathered.unread else str(paths[0]),
            remedy="give logs, stacks, Flight Recorder dumps, RAS output or tables of step times",
        )
    return Diagnosis(_by_job(by_run, gathered), tuple(gathered.read), tuple(gathered.unread))


class _Gathered:
    """Evidence of all files, bounded: what is too much is named."""

    def __init__(self, unread: list[Unread]) -> None:
        self.events: list[LogEvent] = []
        self.stacks: list[StackSample] = []
        self.others: list[object] = []
        self.read: list[tuple[str, str]] = []
        self.unread = unread
        self._full: set[str] = set()
        self._rows = 0

    def read_file(self, path: Path, tell: _Tell) -> None:
        """Ask the readers in turn; the first that recognises the file and can read it counts."""
        try:
            if path.stat().st_size > _TELL_BYTES:
                tell(f"reading {path} ({path.stat().st_size >> 20} MiB)")
            head = head_of(path)
        except (OSError, EOFError) as error:
            self.unread.append(Unread(path=str(path), why=_reason(error)))
            return
        refusals: list[str] = []
        for reader in READERS:
            if not reader.recognises(path, head):
                continue
            before = len(self.others), len(self.events), len(self.stacks), self._rows
            try:
                self._take(reader, path)
            except (KeepstepError, OSError, EOFError) as error:
                refusals.append(f"{reader.name}: {_reason(error)}")
                del self.others[before[0] :], self.events[before[1] :], self.stacks[before[2] :]
                self._rows = before[3]
                if reader is not LOG_READER and _is_text(head):
                    continue
                break
            if (
                reader is LOG_READER
                and self._says_nothing(before[1], rows=bool(refusals and _JSON.match(head)))
                and (why := _no_log(path, head, refusals=refusals))
            ):
                del self.events[before[1] :]
                self.unread.append(Unread(path=str(path), why=why))
                return
            self.read.append((str(path), reader.name))
            lines_of_a_log = len(head) < HEAD_BYTES or head.lstrip()[:1] == b"{"
            if reader is TIMINGS and lines_of_a_log and _is_text(head):
                self._take(LOG_READER, path)  # a summary that a person made, or a log whose lines are objects
            if reader is LOG_READER and path.suffix.lower() in (".md", ".markdown"):
                self._read_pasted(path)
            return
        self.unread.append(Unread(path=str(path), why="; ".join(refusals) or "no format that is known here"))

    def leave_out(self, moments: list[str]) -> None:
        """Without what says who waited in moments that the run itself judged: it knew more than its rings show."""
        judged = set(moments)
        self.others = [
            item
            for item in self.others
            if not isinstance(item, GroupProgress | Transfer | TransferCount)
            or item.moment.split(", generation ")[0] not in judged
        ]

    def _says_nothing(self, first: int, *, rows: bool) -> bool:
        """Whether no event from the `first` on tells more than that lines (of `rows` of a table: steps) were read."""
        dull = ("log_read", "step_progress") if rows else ("log_read",)
        return all(event.kind in dull for event in self.events[first:])

    def _read_pasted(self, path: Path) -> None:
        """Dumps and tables pasted into a document, each block as if it were a file."""
        with tempfile.TemporaryDirectory(prefix="keepstep-") as folder:
            for number, block in enumerate(fenced_blocks(path)):
                part = Path(folder, f"{number}-{path.stem}.txt")
                part.write_bytes(block)
                reader = next((one for one in DUMP_READERS if one.recognises(part, block[:HEAD_BYTES])), None)
                if reader is not None:
                    with contextlib.suppress(KeepstepError, OSError):
                        self._take(reader, part)

    def _take(self, reader: Reader, path: Path) -> None:
        for item in in_its_moment(reader.read(path), path):
            if isinstance(item, Unread):
                self.unread.append(item)
            elif isinstance(item, StackSample):
                self._keep(item, self.stacks, most=_MOST_STACKS, what="stacks", path=path)
            elif isinstance(item, LogEvent):
                self._keep(item, self.events, most=_MOST_EVENTS, what="events", path=path)
            elif isinstance(item, TimingTable) and self._rows + len(item.seconds) > _MOST_TABLE_ROWS:
                self._say_full(f"{_MOST_TABLE_ROWS} rows of tables", path)
            else:
                self._rows += len(item.seconds) if isinstance(item, TimingTable) else 0
                self._keep(item, self.others, most=_MOST_RECORDS, what="records", path=path)

    def _keep(self, item: _Item, kept: list[_Item], *, most: int, what: str, path: Path) -> None:
        if len(kept) < most:
            kept.append(item)
        else:
            self._say_full(f"{most} {what}", path)

    def _say_full(self, what: str, path: Path) -> None:
        """Name once what there is too much of."""
        if what not in self._full:
            self._full.add(what)
            self.unread.append(Unread(path=str(path), why=f"only {what} are kept"))


def _is_text(head: bytes) -> bool:
    return LOG_READER.recognises(Path("text"), head)


def _no_log(path: Path, head: bytes, *, refusals: list[str]) -> str:
    """Why a text in which no line says anything is no log: a table or JSON that cannot be used; "" if it is one."""
    if refusals or (said := without_times(head)):
        return "; ".join(refusals) or said
    if not _JSON.match(head) or is_json_line(head):
        return ""
    try:
        parsed_json(whole(path, limit=_LONGEST_JSON)[0])
    except RecordError as error:
        return f"JSON that cannot be read: {error.what}"
    except OSError as error:
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, KeepstepError):
        return error.what
    return getattr(error, "strerror", None) or "the file is damaged"


def _by_job(by_run: dict[str, list[Finding]], gathered: _Gathered) -> tuple[Finding, ...]:
    """Findings of each job; those that blame first, the surest first."""
    whole = JobEvidence(
        others=cast(list[Evidence], gathered.others),
        events=gathered.events,
        stacks=gathered.stacks,
        runs=list(by_run),
    )
    found: list[Finding] = []
    for job in jobs_apart(whole):
        mine = _together([finding for run in job.runs for finding in by_run[run]], job)
        named = next((finding.job for finding in mine if finding.job), "")
        name = f"{named} ({job.name})" if named and job.name else named or job.name
        found += [_doubted(msgspec.structs.replace(finding, job=name), job.doubts) for finding in mine]
    return tuple(sorted(found, key=lambda finding: (finding.kind == "healthy", -finding.confidence)))


def _doubted(finding: Finding, doubts: tuple[str, ...]) -> Finding:
    """The finding with the doubts whether its evidence is of one job, and no surer than these allow."""
    if not doubts:
        return finding
    sure = min(finding.confidence, _MOST_IN_DOUBT)
    return msgspec.structs.replace(finding, confidence=sure, evidence=(*finding.evidence, *doubts))


def _together(run_findings: list[Finding], job: JobEvidence) -> list[Finding]:
    """Findings of all sources: those that say nothing step back where another source says something."""
    dumps = _not_told_by_run(diagnose_dumps(job.others), run_findings)
    logs = _of_known_ranks(diagnose_logs(job.events, job.stacks), run_findings)
    explained = explained_by_logs(dumps, job.events, stacks=job.stacks)
    sources = (run_findings, explained, logs)
    deciding = [source for source in sources if any(_decides(finding) for finding in source)]
    found = _without_doubles(finding for source in deciding or sources for finding in source)
    return [finding for finding in found if finding.kind != "healthy"] if deciding else _one_answer(found)


def _not_told_by_run(findings: Iterable[Finding], told: Iterable[Finding]) -> list[Finding]:
    """Without hangs in which whoever is suspected may be somebody that the run itself named: one fault, not two."""
    named = {rank for finding in told if _decides(finding) for rank in ranks_of(finding)}
    return [
        finding
        for finding in findings
        if not (
            finding.kind.endswith("_hang")
            and finding.suspects
            and all(any(rank in named for rank in _ends(suspects)) for suspects in finding.suspects)
        )
    ]


def _of_known_ranks(findings: Iterable[Finding], told: Iterable[Finding]) -> list[Finding]:
    """Without hangs that name processes by their numbers only, where the run itself named who stood still.

    Such numbers are in the stacks of its own bundles: it knew which ranks they are.
    """
    known = any(finding.kind.endswith("_hang") and finding.suspects for finding in told)
    return [
        finding
        for finding in findings
        if not (
            known
            and finding.kind.endswith("_hang")
            and finding.suspects
            and all(one.rank is None and one.pid is not None for group in finding.suspects for one in group)
        )
    ]


def _ends(suspects: Iterable[Suspect]) -> set[int | None]:
    return {rank for one in suspects for rank in (one.rank, one.source, one.destination, *(one.link or ()))}


def _decides(finding: Finding) -> bool:
    """Whether a finding names something."""
    return finding.kind not in ("healthy", "undetermined")


def _one_answer(findings: list[Finding]) -> list[Finding]:
    """Nothing is named: healthy by the surest source, unless a source has evidence of trouble without its cause."""
    unclear = [finding for finding in findings if finding.kind == "undetermined" and finding.confidence > 0]
    fine = [finding for finding in findings if finding.kind == "healthy"]
    if unclear:
        return unclear
    if fine:
        return [max(fine, key=lambda finding: finding.confidence)]
    return findings[:1] or [
        Finding(
            kind="undetermined",
            confidence=0.0,
            evidence=("what was read holds nothing that a diagnosis could use",),
            next_probe="logs of all ranks, stacks, Flight Recorder dumps",
        )
    ]


def _without_doubles(findings: Iterable[Finding]) -> list[Finding]:
    """One of findings that blame the same for the same; the surer one, with the other's evidence added."""
    kept: list[Finding] = []
    for finding in findings:
        same = next((item for item in kept if _same(item, finding)), None)
        if same is None:
            kept.append(finding)
            continue
        better, other = (same, finding) if same.confidence >= finding.confidence else (finding, same)
        kept[kept.index(same)] = msgspec.structs.replace(
            better,
            layer=better.layer if better.layer != "undetermined" else other.layer,
            suspects=max((better.suspects, other.suspects), key=_nodes),
            evidence=tuple(dict.fromkeys((*better.evidence, *other.evidence))),
        )
    return kept


def _same(first: Finding, second: Finding) -> bool:
    layers = {first.layer, second.layer} - {"undetermined"}
    return first.kind == second.kind and bool(first.suspects) and len(layers) < 2 and _whom(first) == _whom(second)


def _whom(finding: Finding) -> tuple[frozenset[object], ...]:
    """The suspects; a rank is the same rank with its node and without."""
    return tuple(
        frozenset(suspect if suspect.rank is None else suspect.rank for suspect in group) for group in finding.suspects
    )


def _nodes(suspects: Iterable[Iterable[Suspect]]) -> int:
    """How many suspects come with their node."""
    return sum(one.node is not None for group in suspects for one in group)


def as_json(diagnosis: Diagnosis) -> str:
    """`{"findings": [...], "unread": [...]}` with every field of a finding that a reader needs, also if it is empty."""
    findings = [
        {
            "kind": finding.kind,
            "layer": finding.layer,
            "suspects": [[msgspec.to_builtins(suspect) for suspect in group] for group in finding.suspects],
            "victims": list(finding.victims),
            "confidence": round(finding.confidence, 3),
            "evidence": list(finding.evidence),
            "next_probe": finding.next_probe,
            "cost": finding.cost,
            **({"job": finding.job} if finding.job else {}),
        }
        for finding in diagnosis.findings
    ]
    unread = [{"path": item.path, "why": item.why} for item in diagnosis.unread]
    document = _encodable({"findings": findings, "unread": unread})
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _encodable(value: Any) -> Any:
    """The value with `?` for what UTF-8 does not have: bytes of names of files, halves of characters in JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return {key: _encodable(item) for key, item in value.items()} if isinstance(value, dict) else value
