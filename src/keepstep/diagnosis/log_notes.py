"""What only a person's note says: used where nothing better is there, and never with much confidence."""

from __future__ import annotations

from collections import Counter

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation, words
from keepstep.diagnosis.log_phases import claimed_activity
from keepstep.records.finding import Finding, Suspect

__all__ = ["capture_findings", "claim_findings"]


def claim_findings(case: LogCase) -> list[Finding]:
    """Ranks of which a note says that they stand in data loading or storage, or never came out of it."""
    told = claimed_activity(case)
    if not told:
        return []
    ranks, activity = told[0]
    ranks = sorted({rank for whom, other in told if other.layer == activity.layer for rank in whom})
    where = "data loading" if activity.layer == "dataloader" else "storage"
    supported = [
        event for event in case.of("rank_phase", claims=False) if event.rank is not None and event.rank not in ranks
    ]
    return [
        Finding(
            kind="noncommunication_hang",
            layer=activity.layer,
            suspects=tuple((Suspect(rank=rank),) for rank in ranks[:64]),
            victims=tuple(sorted({event.rank for event in supported if event.rank is not None})),
            confidence=0.6 if supported else 0.45,
            evidence=(
                f"{listed(ranks)} did not get through {where}, as a person notes (their own lines are not here)",
                quotation(activity.event),
                *(f"another rank was further: {quotation(event)}" for event in supported[:2]),
            ),
            next_probe="stacks of these ranks (py-spy dump), their own logs",
        )
    ]


def capture_findings(case: LogCase) -> list[Finding]:
    """Several captures that each show another one apart: reported, and not decided."""
    events = case.of("note_captures")
    if not events:
        return []
    names = [name for event in events for name in event.fields["names"].split()]
    (often, times), *others = Counter(names).most_common()
    apart = f"{often} stands {events[0].fields['where']} in {times} of {len(names)} captures"
    return [
        Finding(
            kind="undetermined",
            confidence=0.2,
            evidence=(
                f"{apart} (weak), {words([f'{name} in {number}' for name, number in others])}" if others else apart,
                "who stands apart changes from capture to capture, and a person tells it: this singles nobody out"
                if others
                else "a person tells it; the captures themselves are not here",
                quotation(events[0]),
            ),
            next_probe=(
                "Flight Recorder dumps or NCCL RAS of all ranks at one moment (which collective is the first "
                "that not all "
                "have entered?), the same stacks a minute later"
            ),
        )
    ]
