"""Ranks that ended by themselves while others wait for them: they had fewer batches, or took a branch that ends."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, Suspect

__all__ = ["EarlyEnd", "early_end", "early_end_finding", "with_early_end"]

_GONE = 0.8
_SAYS_SO = 0.6
_DOUBT = 0.2
"""Less sure by so much where others neither wait nor have ended."""
_FAILED = ("exception", "crashed", "gpu_memory", "cuda_error", "nccl_error")
_GOES_ON = frozenset(
    {"step_progress", "progress_bar", "save_began", "evaluation_began", "rank_phase", "group_status", "nccl_init"}
)
_PROBE = "how many batches each rank was given (sampler, drop_last), and which branch ends the loop on this rank alone"


class EarlyEnd(msgspec.Struct, frozen=True):
    """The ranks that ended, each with the line that says so. `gone`: their processes have; else only their training."""

    ends: dict[int, LogEvent]
    gone: bool

    @property
    def confidence(self) -> float:
        """How sure it is that the others wait for nobody else."""
        return _GONE if self.gone else _SAYS_SO


def early_end(case: LogCase, waiting: Collection[int]) -> EarlyEnd | None:
    """The ranks that ended while those of `waiting` wait; None if no line says so, or if they are not the fewer."""
    failed = {event.rank for event in case.of(*_FAILED, claims=False)}
    out = {*failed, *waiting}
    gone = _last(case, {rank: event for rank, event in _processes(case).items() if rank not in out})
    ends = gone or _last(case, {rank: event for rank, event in _trainings(case, waiting).items() if rank not in failed})
    return EarlyEnd(ends, bool(gone)) if 0 < len(ends) < len(waiting) else None


def early_end_finding(early: EarlyEnd, waiting: dict[int, LogEvent], *, speakers: Collection[int]) -> Finding:
    """The finding about ranks that ended, from lines alone; `waiting` has the line of each time-out."""
    others = sorted(set(speakers) - waiting.keys() - early.ends.keys())
    return Finding(
        kind="noncommunication_hang",
        layer="application",
        suspects=_suspects(early),
        victims=tuple(sorted(waiting)),
        confidence=early.confidence - (_DOUBT if others else 0.0),
        evidence=(
            f"{listed(waiting)} waited in a collective until the time-out",
            *_said(early),
            *(quotation(event) for event in list(waiting.values())[:2]),
            *([f"of {listed(others)} no line says that it waits or has ended"] if others else []),
        ),
        next_probe=_PROBE,
    )


def with_early_end(finding: Finding, early: EarlyEnd) -> Finding:
    """A finding about ranks that did not come, or reported nothing, with what their lines say: they had ended."""
    return msgspec.structs.replace(
        finding,
        kind="noncommunication_hang",
        layer="application",
        suspects=_suspects(early),
        confidence=max(finding.confidence, early.confidence),
        evidence=(*finding.evidence, *_said(early)),
        next_probe=_PROBE,
    )


def _suspects(early: EarlyEnd) -> tuple[tuple[Suspect, ...], ...]:
    return tuple((Suspect(rank=rank),) for rank in sorted(early.ends))


def _said(early: EarlyEnd) -> tuple[str, ...]:
    what = "ended by itself, without an error" if early.gone else "says that its training ended"
    lines = [quotation(event) for _, event in sorted(early.ends.items())]
    return (f"{listed(early.ends)} {what}, while others still call collectives", *lines[:3])


def _processes(case: LogCase) -> dict[int, LogEvent]:
    """Ranks whose process ended. Where NCCL says that a communicator is destroyed, only the largest one is the job."""
    done = case.of("process_done", claims=False)
    sizes = [_size(event) for event in (*case.of("nccl_init", claims=False), *done)]
    largest = max(sizes, default=0)
    found = {}
    for event in done:
        told = event.fields.get("rank", "")
        rank = int(told) if told.isdecimal() else event.rank
        if rank is not None and _size(event) in (0, largest):
            found[rank] = event
    return found


def _size(event: LogEvent) -> int:
    told = event.fields.get("nranks", "")
    return int(told) if told.isdecimal() and len(told) < 8 else 0


def _trainings(case: LogCase, waiting: Collection[int]) -> dict[int, LogEvent]:
    """Ranks whose training ended; none where it ended for one that waits, too."""
    ended = {event.rank: event for event in case.of("training_ended", claims=False) if event.rank is not None}
    return {} if any(rank in waiting for rank in ended) else ended


def _last(case: LogCase, ends: dict[int, LogEvent]) -> dict[int, LogEvent]:
    """Those of `ends` behind which the file has nothing that the rank goes on with, or begins again."""
    if not ends:
        return ends
    newest: dict[tuple[int | None, str], int] = {}
    for event in case.events:
        if event.kind in _GOES_ON:
            key = event.rank, event.path
            newest[key] = max(newest.get(key, 0), event.line)
    return {rank: event for rank, event in ends.items() if newest.get((rank, event.path), 0) <= event.line}
