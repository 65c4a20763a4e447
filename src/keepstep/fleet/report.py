"""The report of one run: what was lost, how it was repaired, what was kept. Pure: journal records in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from keepstep.fleet.coverage_text import coverage_text
from keepstep.records.drills import may_cost
from keepstep.records.events import (
    PHASES,
    CoverageRecord,
    DrillRecord,
    Event,
    Finding,
    Incident,
    JobEnded,
    JobStarted,
    StepProgress,
)
from keepstep.records.finding_words import ranks_of, suspect_words
from keepstep.records.move_words import move_lines
from keepstep.records.moves import MoveRecord

__all__ = ["FOR_THE_REPORT", "FindingReport", "IncidentReport", "RunReport", "report_text", "summarise"]

FOR_THE_REPORT = (JobStarted, JobEnded, Finding, Incident, DrillRecord, CoverageRecord, MoveRecord, StepProgress)
"""The kinds of records that `summarise` reads: no other one reaches the report. Of `StepProgress` the last counts."""
_DRILL_WINDOW_S = 30.0
"""A drill explains an incident of its rank that begins at most so long after it (a freeze is seen late)."""
_EVIDENCE_SHOWN = 6
_Kind = TypeVar("_Kind", bound=Event)
_STILL_RUNNING = "the job is still running"
_EARLY_S = 1.0
"""The onset may be a collective that began before the injection: the lost rank was already awaited."""


class IncidentReport(msgspec.Struct, frozen=True):
    """One incident; phases and `injected` are seconds from the onset, None where not reached or unknown.

    `onset_wall` is the wall-clock time of the onset. `steps_recomputed` counts steps done again, `members_changed`
    the members replaced, `bytes_moved` the state that went to joiners, `source` where it came from. Where several
    `ranks` were lost as one, with `domain`, `rank` is None.
    """

    kind: str
    rank: int | None
    node: str | None
    onset_wall: float
    onset: float | None
    detected: float | None
    decided: float | None
    fenced: float | None
    standby_chosen: float | None
    warmed: float | None
    connected: float | None
    copied: float | None
    joined: float | None
    first_valid_step: float | None
    injected: float | None
    steps_recomputed: int
    bytes_moved: int
    members_changed: int
    note: str
    ranks: tuple[int, ...] = ()
    domain: str = ""
    source: str = ""


class FindingReport(msgspec.Struct, frozen=True):
    """What was found, about which ranks (suspects; empty if unknown), at which step, and what leads to it.

    `suspects` are sets of what cannot be told apart, in words. `ended` says that it had passed before the job ended.
    `bundle` is the folder of the run directory that holds the evidence, `refers` the finding that a probe narrowed.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int | None
    evidence: tuple[str, ...]
    number: int = 0
    layer: str = "undetermined"
    suspects: tuple[tuple[str, ...], ...] = ()
    victims: tuple[int, ...] = ()
    confidence: float = 1.0
    ended: bool = False
    next_probe: str = ""
    bundle: str = ""
    refers: int | None = None


class RunReport(msgspec.Struct, frozen=True):
    """The whole run. `moves` are the planned ones, as in the journal.

    `exit_code` is None where the journal has no end; `steps_kept` is then the last sample's.

    `kept_step_share` is steps kept / (steps kept + steps recomputed). `false_alarm_s` is time lost to incidents in
    which nobody turned out to be lost. `predicted_losses` is the last table of what each domain's loss would cost.
    """

    job: str
    script: str
    world: int
    exit_code: int | None
    why: str
    incidents: tuple[IncidentReport, ...]
    steps_kept: int
    kept_step_share: float | None
    weights_sha256: str
    false_alarm_s: float
    duration_s: float | None
    findings: tuple[FindingReport, ...] = ()
    moves: tuple[MoveRecord, ...] = ()
    predicted_losses: CoverageRecord | None = None


def summarise(events: Iterable[Event], *, running: bool = False) -> RunReport:
    """The report of the job whose journal holds `events`, in order. Nothing is read but the records.

    `running` says that a journal without an end is of a job that still runs.
    """
    told = [event for event in events if isinstance(event, FOR_THE_REPORT)]
    started = next(iter(_of(told, JobStarted)), None)
    ended = next(reversed(_of(told, JobEnded)), None)
    coverage = next(reversed(_of(told, CoverageRecord)), None)
    sampled = next(reversed(_of(told, StepProgress)), None)
    drills = [d for d in _of(told, DrillRecord) if not d.ended and may_cost(d.fault)]
    findings: dict[int, Finding] = {}
    for finding in _of(told, Finding):
        findings[finding.number or -len(findings) - 1] = finding  # the last word on a number counts
    reports = tuple(_incident(incident, drills) for incident in _of(told, Incident))
    kept = ended.steps_kept if ended else (sampled.step or 0) if sampled else 0
    computed = kept + sum(report.steps_recomputed for report in reports)
    return RunReport(
        job=started.job if started else "",
        script=started.script if started else "",
        world=started.world if started else 0,
        exit_code=ended.exit_code if ended else None,
        why=ended.why if ended else _STILL_RUNNING if running else "the journal has no end: the run was cut off",
        incidents=reports,
        steps_kept=kept,
        kept_step_share=kept / computed if computed else None,
        weights_sha256=ended.weights_sha256 if ended else "",
        false_alarm_s=sum(report.first_valid_step or 0.0 for report in reports if not report.members_changed),
        duration_s=ended.wall - started.wall if started and ended else None,
        findings=tuple(_finding(finding) for finding in findings.values()),
        moves=tuple(_of(told, MoveRecord)),
        predicted_losses=coverage,
    )


def _of(events: Sequence[Event], kind: type[_Kind]) -> list[_Kind]:
    """Those of one kind, which must be in `FOR_THE_REPORT`, in order."""
    return [event for event in events if isinstance(event, kind)]


def _finding(finding: Finding) -> FindingReport:
    ranks = {*ranks_of(finding), *(() if finding.rank is None else (finding.rank,))}
    return FindingReport(
        kind=finding.kind,
        ranks=tuple(sorted(ranks)),
        step=finding.step,
        evidence=finding.evidence,
        number=finding.number,
        layer=finding.layer,
        suspects=tuple(tuple(suspect_words(suspect) for suspect in group) for group in finding.suspects),
        victims=finding.victims,
        confidence=finding.confidence,
        ended=finding.status == "ended",
        next_probe=finding.next_probe,
        bundle=finding.bundle,
        refers=finding.refers,
    )


def _incident(incident: Incident, drills: list[DrillRecord]) -> IncidentReport:
    """The report of one incident; the drill that caused it is taken out of `drills`."""
    injected = incident.injected
    if injected is None and incident.onset_wall:
        for drill in drills:
            since = incident.onset_wall - drill.wall
            if drill.rank in (incident.ranks or (incident.rank,)) and -_EARLY_S <= since <= _DRILL_WINDOW_S:
                injected = -since
                drills.remove(drill)
                break
    return IncidentReport(
        kind=incident.kind,
        rank=incident.rank,
        node=incident.node,
        onset_wall=incident.onset_wall,
        injected=injected,
        steps_recomputed=incident.steps_recomputed,
        bytes_moved=incident.bytes_moved,
        members_changed=incident.members_changed,
        note=incident.note,
        ranks=incident.ranks,
        domain=incident.domain,
        source=incident.source,
        **{phase: getattr(incident, phase) for phase in PHASES},
    )


def report_text(report: RunReport) -> str:
    """The report for people: what was kept, and a time line of every incident in milliseconds from its onset."""
    lines = [f"job {report.job}: {_ending(report)}"]
    share = "" if report.kept_step_share is None else f" ({report.kept_step_share:.2%} of the steps computed)"
    lines.append(f"steps kept {report.steps_kept}{share}, incidents {len(report.incidents)}")
    if report.weights_sha256:
        lines.append(f"final weights sha256 {report.weights_sha256}")
    for number, incident in enumerate(report.incidents, 1):
        lines += _timeline(number, incident)
    lines += [line for move in report.moves for line in move_lines(move)]
    lines += [_found(finding) for finding in report.findings]
    table = report.predicted_losses
    if table is not None and report.exit_code is None:
        lines += coverage_text(table)
    return "\n".join(lines)


def _found(finding: FindingReport) -> str:
    """One finding: who cannot be told apart is joined by `or`; then what leads to it and what to do next."""
    name = f"finding {finding.number}" if finding.number else "finding"
    groups = [" or ".join(group) for group in finding.suspects]
    whom = f", {' and '.join(groups)}" if groups else f", ranks {', '.join(map(str, finding.ranks))}"
    step = "" if finding.step is None else f", step {finding.step}"
    layer = "" if finding.layer == "undetermined" else f", {finding.layer}"
    over = ", ended" if finding.ended else ""
    refers = "" if finding.refers is None else f" (narrows finding {finding.refers})"
    sure = f" ({finding.confidence:.0%} sure)" if finding.confidence < 1 else ""
    head = f"{name}: {finding.kind}{whom if groups or finding.ranks else ''}{layer}{step}{over}{sure}{refers}"
    lines = [f"{head}: {'; '.join(finding.evidence[:_EVIDENCE_SHOWN])}"]
    if finding.next_probe and not finding.ended:
        lines.append(f"  next: {finding.next_probe}")
    if finding.bundle:
        lines.append(f"  evidence: {finding.bundle}")
    return "\n".join(lines)


def _ending(report: RunReport) -> str:
    if report.exit_code is None and report.why == _STILL_RUNNING:
        return report.why
    took = "" if report.duration_s is None else f" after {report.duration_s:.1f} s"
    code = "no exit code" if report.exit_code is None else f"exit code {report.exit_code}"
    return f"{code}{took}" + (f", {report.why}" if report.why else "")


def _timeline(number: int, incident: IncidentReport) -> list[str]:
    one = "no rank" if incident.rank is None else f"rank {incident.rank}"
    whom = f"ranks {', '.join(map(str, incident.ranks))}" if incident.ranks else one
    where = whom + (f" on {incident.node}" if incident.node else "")
    phases = [(phase, getattr(incident, phase)) for phase in PHASES] + [("injected", incident.injected)]
    reached = sorted(((at, phase) for phase, at in phases if at is not None), key=lambda item: item[0])
    lines = [f"incident {number}: {incident.kind}, {where}", f"  {'phase':<18}{'ms':>10}{'+ms':>10}"]
    before = reached[0][0] if reached else 0.0
    for at, phase in reached:
        lines.append(f"  {phase:<18}{at * 1e3:>10.1f}{(at - before) * 1e3:>10.1f}")
        before = at
    lines.append(
        f"  steps recomputed {incident.steps_recomputed}, bytes moved {incident.bytes_moved}, "
        f"members changed {incident.members_changed}" + (f", state from {incident.source}" if incident.source else "")
    )
    return lines + ([f"  {incident.note}"] if incident.note else [])
