"""Slow ranks from a few numbers that a person tabulated: one value a rank and phase, no steps, no spread.

With so little, a verdict needs a gap that no noise explains; else the answer is what to measure.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.log_case import LogCase, quotation
from keepstep.diagnosis.rank_rows import rows_of_ranks
from keepstep.records.evidence import LogEvent
from keepstep.records.finding import Finding, Layer, Suspect

__all__ = ["contention_findings", "phase_findings", "value_findings"]

_LAYERS: dict[str, Layer] = {
    "data": "dataloader",
    "checkpoint": "storage",
    "host": "host_cpu",
    "clock": "hardware_gpu",
    "temperature": "hardware_gpu",
}
_LOWEST_IS_WRONG = ("communication", "clock")
_PAIR = re.compile(r"(?<!\S)(\d{1,9}):(-?\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?)(?!\S)")
_UNEVEN = 1.25
_SHARE = 0.05
"""Gaps below this share of the median are never a verdict."""
_SPREADS = 5.0
_AGAINST_MEDIAN = 1.3
_LEAST_WAIT = 0.7
_CONTENTION = 3.0
_FEW_CORES = 2


def value_findings(case: LogCase) -> list[Finding]:
    """One finding for each row of numbers; `undetermined` where the row cannot single anybody out."""
    rows = [*case.of("phase_table"), *rows_of_ranks(case)]
    found = [_row(event) for event in rows]
    labelled = {event.fields.get("label") for event in rows}
    if len(labelled) > 1 or len(found) < 2:
        return found
    named = [finding for finding in found if finding.suspects]
    uneven = [finding for finding in found if finding.kind == "imbalance"]
    named.sort(key=lambda finding: -finding.confidence)
    return uneven[:1] or named[:1] or found[:1]


def _row(event: LogEvent) -> Finding:
    values = {int(rank): float(value) for rank, value in _PAIR.findall(event.fields["values"])}
    phase = event.fields.get("phase", "")
    if event.fields.get("peers") == "median" and len(values) == 2:
        return _against_median(event, values, phase=phase)
    if len(values) < 3:
        return _too_little(event, "two numbers show that two ranks differ, not which of them is wrong")
    low, high = min(values, key=lambda rank: values[rank]), max(values, key=lambda rank: values[rank])
    if phase == "load":
        return _uneven(event, values)
    if phase in _LOWEST_IS_WRONG:
        middle, gap = _gap(values, low)
        if -gap > max(_SPREADS * _spread(values, low), (1 - _LEAST_WAIT) * middle):
            return _slow(
                event, low, says=_LOW_SAYS[phase].format(rank=low, value=values[low], middle=middle), phase=phase
            )
    else:
        middle, gap = _gap(values, high)
        if gap > max(_SPREADS * _spread(values, high), _SHARE * middle):
            return _slow(
                event, high, says=f"rank {high} takes {values[high]:g} where the others take {middle:g}", phase=phase
            )
    names = f"rank {low} is lowest ({values[low]:g}), rank {high} highest ({values[high]:g})"
    return _too_little(event, f"{names}: too close for a verdict without the spread over the steps")


_LOW_SAYS = {
    "communication": "rank {rank} waits least in communication: the others wait for it",
    "clock": "the device of rank {rank} runs at {value:g} where the others run at {middle:g}",
}


def _uneven(event: LogEvent, values: dict[int, float]) -> Finding:
    """Work given to ranks in different amounts: nobody is at fault."""
    middle, top = statistics.median(values.values()), max(values.values())
    if middle <= 0 or top < _UNEVEN * middle:
        return _too_little(event, "work is spread evenly")
    return Finding(
        kind="imbalance",
        layer="application",
        confidence=0.65,
        evidence=(
            f"{event.fields['name']}: from {min(values.values()):g} to {top:g} by rank, {middle:g} in "
            "the middle: the work is "
            "uneven, no member is at fault",
            quotation(event),
        ),
        next_probe="the same numbers for more steps: does the rank with the most work change?",
    )


def _gap(values: dict[int, float], rank: int) -> tuple[float, float]:
    """Median of the others, and how far `rank` is above it."""
    middle = statistics.median(value for other, value in values.items() if other != rank)
    return middle, values[rank] - middle


def _spread(values: dict[int, float], rank: int) -> float:
    others = [value for other, value in values.items() if other != rank]
    return max(others) - min(others)


def _against_median(event: LogEvent, values: dict[int, float], *, phase: str) -> Finding:
    """The first rank against the one that stands for the median of all."""
    (rank, value), (_, middle) = values.items()
    if phase != "communication" and value > _AGAINST_MEDIAN * middle:
        return _slow(event, rank, says=f"rank {rank} takes {value:g} where the median is {middle:g}", phase=phase)
    return _too_little(event, f"{value:g} against a median of {middle:g} is no clear difference")


def _slow(event: LogEvent, rank: int, *, says: str, phase: str) -> Finding:
    layer = _LAYERS.get(phase, "application")
    doubt = (
        () if phase in _LAYERS else ("clocks and temperature of its device are not given: the device is not excluded",)
    )
    label = event.fields.get("label")
    return Finding(
        kind="compute_slow",
        layer=layer,
        suspects=((Suspect(rank=rank),),),
        confidence=0.75 if phase in _LAYERS else 0.6,
        evidence=(f"{label + ': ' if label else ''}{event.fields['name']}: {says}", quotation(event), *doubt),
        next_probe="the same numbers step by step; loader workers and files of this rank"
        if phase == "data"
        else "the same numbers step by step; a compute test of this rank's device next to a peer's",
    )


def _too_little(event: LogEvent, says: str) -> Finding:
    label = event.fields.get("label")
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(
            f"{label + ': ' if label else ''}{event.fields['name']}: {says}",
            *(
                ("a phase that contains collectives is as long on all ranks as on the slowest one",)
                if event.fields.get("phase") in ("backward", "step")
                else ()
            ),
            quotation(event),
        ),
        next_probe="times per step and rank, with the time in collectives apart from the time in compute",
    )


def contention_findings(case: LogCase) -> list[Finding]:
    """Work of the host that takes longer the more ranks a node has, or a slowest rank that changes: nobody's fault."""
    rotating = case.of("note_rotates")
    series: dict[str, list[LogEvent]] = defaultdict(list)
    for event in case.of("note_scaling"):
        series[event.fields.get("phase", "")].append(event)
    for phase, events in series.items():
        few, many = (pick(events, key=lambda event: int(event.fields["number"])) for pick in (min, max))
        before, after = float(few.fields["high"]), float(many.fields["low"])
        if int(few.fields["number"]) < int(many.fields["number"]) and before > 0 and after / before >= _CONTENTION:
            return [_contention(few, many, phase=phase, rotating=rotating)]
    bound = _bound_together(case)
    if bound:
        return [bound]
    if rotating:
        return [
            Finding(
                kind="imbalance",
                confidence=0.4,
                evidence=(
                    "the slowest rank changes: no member is at fault",
                    *(quotation(event) for event in rotating[:2]),
                ),
                next_probe=(
                    "run delay and CPU binding of the processes (taskset -p, numactl), sequence lengths by rank "
                    "and step"
                ),
            )
        ]
    return []


def _contention(few: LogEvent, many: LogEvent, *, phase: str, rotating: list[LogEvent]) -> Finding:
    return Finding(
        kind="compute_slow",
        layer="dataloader" if phase == "data" else "host_cpu",
        confidence=0.8 if rotating else 0.65,
        evidence=(
            "the host's part of a step takes many times longer with all ranks on the node than with one: "
            "they are in each "
            "other's way",
            quotation(few),
            quotation(many),
            *("the slowest rank changes, so it is not one rank or device" for _ in rotating[:1]),
        ),
        next_probe="CPU and NUMA binding of each process (one memory domain a rank), threads a rank, run delay",
    )


def _bound_together(case: LogCase) -> Finding | None:
    """Several processes that may only run on the same few processors."""
    lists: dict[str, list[LogEvent]] = defaultdict(list)
    for event in case.of("cpu_bound", claims=False):
        if event.fields.get("list"):
            lists[event.fields["list"]].append(event)
    crowded = [(cores, events) for cores, events in lists.items() if len(events) > 1 and _cores(cores) <= _FEW_CORES]
    if not crowded:
        return None
    cores, events = crowded[0]
    return Finding(
        kind="compute_slow",
        layer="host_cpu",
        suspects=((Suspect(node=events[0].node),),) if events[0].node else (),
        confidence=0.75,
        evidence=(
            f"{len(events)} processes may only run on processor {cores}",
            *(quotation(event) for event in events[:3]),
        ),
        next_probe="the binding that the launcher sets (--cpu-bind, taskset, OMP_PROC_BIND)",
    )


def _cores(text: str) -> int:
    total = 0
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        total += int(high or low) - int(low) + 1 if low.isdigit() and (not high or high.isdigit()) else 1_000
    return total


def phase_findings(case: LogCase) -> list[Finding]:
    """Ranks whose last word is that they begin to load data, or of which a person says so, while others are further."""
    last: dict[int, LogEvent] = {}
    for event in case.of("rank_phase", claims=False):
        if event.rank is not None:
            last[event.rank] = event
    loading = {
        rank: event
        for rank, event in last.items()
        if event.fields["phase"] == "data"
        and event.fields["edge"].startswith(("before", "load", "fetch", "start", "enter", "begin", "wait"))
    }
    further = {rank: event for rank, event in last.items() if rank not in loading}
    if not loading or not further or case.has("training_ended"):
        return []
    first = next(iter(further.values()))
    return [
        Finding(
            kind="noncommunication_hang",
            layer="dataloader",
            suspects=tuple((Suspect(rank=rank),) for rank in sorted(loading)),
            victims=tuple(sorted(further)),
            confidence=0.6,
            evidence=(
                f"{listed(loading)} had begun to load data and say nothing after it",
                *(quotation(event) for event in list(loading.values())[:3]),
                f"others were further: {quotation(first)}",
            ),
            next_probe="stacks of these ranks (py-spy dump)",
        )
    ]
