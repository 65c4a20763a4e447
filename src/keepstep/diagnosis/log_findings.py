"""Everything that logs and stacks of one job say, as findings: the strongest kind of evidence first.

Order: ranks that disagree, machines that say that they broke, causes that programs name, stacks, sequence numbers and
reports of who did not come, numbers and notes of people; then symptoms without a cause. What only follows from
something stronger is evidence of that, not a finding of its own. If nothing is wrong the answer is `healthy`; if the
logs cannot tell it is `undetermined`, with what to collect.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.diagnosis.caught import Caught
from keepstep.diagnosis.disagreements import calls_that_differ, fingerprint_findings, models_that_differ
from keepstep.diagnosis.fault_causes import causes_of, named_events, symptoms_of
from keepstep.diagnosis.log_case import LogCase, quotation, words
from keepstep.diagnosis.log_hang import hang_findings, startup_findings
from keepstep.diagnosis.log_health import health_findings, setting_findings, slow_network_findings
from keepstep.diagnosis.log_notes import capture_findings, claim_findings
from keepstep.diagnosis.phase_values import contention_findings, phase_findings, value_findings
from keepstep.diagnosis.rank_rows import count_findings
from keepstep.diagnosis.stack_verdict import diagnose_stacks
from keepstep.records.evidence import LogEvent, StackSample
from keepstep.records.finding import Finding

__all__ = ["diagnose_logs"]

_SURE = 0.5
"""Causes that are no surer than this step back behind stacks and sequence numbers."""


def diagnose_logs(events: Iterable[LogEvent], stacks: Iterable[StackSample] = ()) -> tuple[Finding, ...]:
    """Findings of one job's logs; empty only if there is neither an event nor a stack."""
    case = LogCase(events, stacks)
    if not case.events and not case.stacks:
        return ()
    return tuple(_told(case))


def _told(case: LogCase) -> list[Finding]:
    differing = [
        *fingerprint_findings(case),
        *calls_that_differ(case),
        *models_that_differ(case),
        *count_findings(case),
    ]
    causes = causes_of(case)
    if differing:
        hard = causes if named_events(case, "hard") else []
        return [*differing, *hard]
    sure = [finding for finding in causes if finding.confidence > _SURE]
    hang = hang_findings(case)
    if sure:
        return [_placed_by_numbers(_with_waiters(finding, hang), case) for finding in sure]
    for found in (
        diagnose_stacks(case.stacks, stalled=_stalled(case)),
        hang,
        startup_findings(case),
        setting_findings(case),
    ):
        if _says_something(found):
            return found
    slow = [*value_findings(case), *contention_findings(case)]
    if slow and not hang:
        return slow
    for found in (health_findings(case), phase_findings(case), claim_findings(case), causes):
        if _says_something(found):
            return _after(found, hang)
    symptoms = symptoms_of(case)
    if _says_something(symptoms):
        return _after(symptoms, hang)
    unclear = [*hang, *diagnose_stacks(case.stacks), *capture_findings(case), *causes, *symptoms]
    return unclear[:1] or slow[:1] or health_findings(case)[:1] or slow_network_findings(case) or [_quiet(case)]


def _stalled(case: LogCase) -> bool:
    """Whether a watchdog or a person says that the job does not go on."""
    return case.has("watchdog_timeout", "watchdog_stuck", "note_hang")


def _placed_by_numbers(finding: Finding, case: LogCase) -> Finding:
    """A cause that names nobody, with the rank that numbers of the same layer single out."""
    if finding.suspects:
        return finding
    same = [item for item in value_findings(case) if item.layer == finding.layer and item.suspects]
    if not same:
        return finding
    return msgspec.structs.replace(finding, suspects=same[0].suspects, evidence=(*finding.evidence, *same[0].evidence))


def _says_something(found: list[Finding]) -> bool:
    return any(finding.kind != "undetermined" for finding in found)


def _after(found: list[Finding], hang: list[Finding]) -> list[Finding]:
    """A finding from notes or weak causes keeps what the hang report shows: who only waits."""
    return [_with_waiters(finding, hang) for finding in found]


def _with_waiters(finding: Finding, hang: list[Finding]) -> Finding:
    """Ranks that the hang report shows as waiting are victims of the cause, except those it names."""
    if finding.kind == "healthy":
        return finding
    blamed = {suspect.rank for group in finding.suspects for suspect in group}
    waiting = {rank for item in hang for rank in item.victims} - blamed
    return msgspec.structs.replace(
        finding, victims=tuple(sorted(set(finding.victims) | {rank for rank in waiting if rank is not None}))
    )


def _quiet(case: LogCase) -> Finding:
    """No line speaks of a fault: healthy if the job shows that it moves, else nothing can be said."""
    steps = case.of("step_progress", claims=False)
    ended = case.of("training_ended", claims=False)
    torn = case.of("teardown", claims=False)
    if (steps or ended) and not torn:
        last = (ended or steps)[-1]
        return Finding(
            kind="healthy",
            confidence=0.8 if ended else 0.6,
            evidence=(
                "no line speaks of a fault"
                + (", and training ended" if ended else ", and steps go on to the end of the log"),
                quotation(last),
                *(f"training went on after it: {quotation(event)}" for event in Caught(case).errors()[:2]),
                *(f"the scheduler ended the job: {quotation(event)}" for event in case.of("job_cancelled")[:1]),
            ),
            next_probe="" if ended else "if the job does stand still: stacks of all ranks, or Flight Recorder dumps",
        )
    read = sum(event.line for event in case.of("log_read"))
    known = sorted({event.kind for event in case.events} - {"log_read"})
    return Finding(
        kind="undetermined",
        confidence=0.0,
        evidence=(
            f"{read} lines read; none of them names a cause" + (f" (they tell of: {words(known)})" if known else ""),
            *(quotation(event) for event in torn[:2]),
        ),
        next_probe=(
            "logs of all ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO, stacks of all "
            "ranks (py-spy dump), "
            "Flight Recorder dumps, dmesg of the nodes"
        ),
    )
