"""Numbers that each rank prints on a line of its own, brought together; and ranks that counted differently."""

from __future__ import annotations

import statistics
from collections import defaultdict

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, Suspect

__all__ = ["count_findings", "rows_of_ranks"]

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "sec": 1000.0}
_FEWEST = 3


def rows_of_ranks(case: LogCase) -> list[LogEvent]:
    """One `phase_table` event for each phase of which three ranks or more gave times; the median of many."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    first: dict[str, LogEvent] = {}
    for event in case.of("rank_values", claims=False):
        if event.rank is None:
            continue
        for item in event.fields["values"].split():
            phase, _, value = item.partition("=")
            number = value.rstrip("abcdefghijklmnopqrstuvwxyz")
            times[phase][event.rank].append(float(number) * _UNITS[value[len(number) :]])
            first.setdefault(phase, event)
    return [_row(phase, by_rank, event=first[phase]) for phase, by_rank in times.items() if len(by_rank) >= _FEWEST]


def _row(phase: str, by_rank: dict[int, list[float]], *, event: LogEvent) -> LogEvent:
    values = " ".join(f"{rank}:{statistics.median(numbers):g}" for rank, numbers in sorted(by_rank.items()))
    fields = {"values": values, "name": f"{phase} (ms)", "phase": phase, "unit": "ms"}
    return LogEvent(kind="phase_table", path=event.path, line=event.line, text=event.text, fields=fields)


def count_findings(case: LogCase) -> list[Finding]:
    """Ranks that counted more batches than others and then wait: they call collectives that the others do not."""
    counts: dict[int, tuple[int, LogEvent]] = {}
    for event in case.of("rank_count", claims=False):
        if event.rank is not None:
            counts[event.rank] = (int(event.fields["count"]), event)
    if len(counts) < 2 or len({count for count, _ in counts.values()}) < 2:
        return []
    top = max(count for count, _ in counts.values())
    ahead = sorted(rank for rank, (count, _) in counts.items() if count == top)
    waiting = {event.rank for event in case.of("watchdog_timeout")}
    if not waiting or not waiting <= set(ahead):
        return []
    few = next(event for count, event in counts.values() if count < top)
    return [
        Finding(
            kind="collective_mismatch",
            layer="application",
            suspects=tuple((Suspect(rank=rank),) for rank in ahead),
            victims=(),
            confidence=0.75,
            evidence=(
                f"{listed(ahead)} did {top}, others fewer: the number of collectives depends on the rank",
                quotation(counts[ahead[0]][1]),
                quotation(few),
                *(quotation(event) for event in case.of("watchdog_timeout")[:2]),
            ),
            next_probe="the sampler: equal numbers of batches for all ranks (drop_last, padding), or the join context",
        )
    ]
