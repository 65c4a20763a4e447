"""Findings about slow members in tables of times, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from keepstep.diagnosis.lateness import Lateness, runs_of
from keepstep.records.finding import Finding, Layer, Suspect
from keepstep.records.timing_table import TimingTable

__all__ = [
    "Slow",
    "common_stall",
    "extra_seconds",
    "imbalance",
    "layer_of",
    "probe_of",
    "slow_finding",
    "too_little",
    "with_doubles_said",
]

_LAYERS: dict[str, Layer] = {
    "data": "dataloader",
    "checkpoint": "storage",
    "gc": "application",
    "validation": "application",
}
_PROBES: dict[str, str] = {
    "data": "loader workers, and reads of the data set, on this member's host",
    "checkpoint": "write speed of this member's host to the checkpoint storage",
    "communication": "stack and compute time of this member between two collectives",
    "gc": "garbage collector settings (gc.freeze, or the same interval on all ranks)",
}
_USUAL_PROBE = (
    "clocks, temperature and throttle reasons of its device, run delay of its process, a compute test next to a peer"
)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Slow:
    """A member that is late: row in the matrix, ratio to its peers, first and last step (as columns), share of them."""

    row: int
    ratio: float
    first: int
    last: int
    share: float


def layer_of(phase: str) -> Layer:
    """Whose problem it is that a phase takes long, as far as its name says."""
    return _LAYERS.get(phase, "undetermined")


def probe_of(phase: str) -> str:
    """What would make it certain."""
    return _PROBES.get(phase, _USUAL_PROBE)


def slow_finding(table: TimingTable, lateness: Lateness, *, item: Slow, by_chance: float) -> Finding:
    """One member that is slow for long, or for a while."""
    first, last = int(lateness.steps[item.first]), int(lateness.steps[item.last])
    whole = item.first == 0 and item.last == len(lateness.steps) - 1
    until_the_end = item.last >= len(lateness.steps) - 3
    peers = "its peers of the same role" if lateness.by_role else "the other members"
    peak = float(np.nanmax(lateness.ratio[item.row, item.first : item.last + 1]))
    who = _name(table, lateness, row=item.row)
    if table.phase == "communication":
        evidence = [f"{who} spends {item.ratio:.2f} times as long in communication as {peers}: they wait for it"]
    else:
        evidence = [
            f"{who} takes {item.ratio:.2f} times as long as {peers} in phase {table.phase}"
            + (f", in {item.share:.0%} of {len(lateness.steps)} steps" if whole else f", steps {first} to {last}"),
        ]
    if not whole:
        evidence.append(
            f"a burst: up to {peak:.2f} times"
            + (", to the end of the table" if until_the_end else ", then it recovers")
        )
    certain = 0.9 if whole else 0.8 if until_the_end else 0.75
    if item.ratio < 1.15 and table.phase != "communication":
        certain -= 0.2
    extra = extra_seconds(lateness, item) if table.unit_known and table.phase != "communication" else None
    return Finding(
        kind="compute_slow",
        layer=layer_of(table.phase),
        suspects=((_suspect(table, lateness, row=item.row),),),
        victims=_others(table, lateness, row=item.row),
        confidence=certain - 0.2 * min(1.0, by_chance),
        evidence=tuple(evidence),
        next_probe=probe_of(table.phase),
        cost=None if extra is None else extra * len(lateness.members),
    )


def imbalance(table: TimingTable, lateness: Lateness, *, slow: list[Slow]) -> Finding:
    """Work that is not spread evenly; nobody is suspected."""
    if slow:
        names = ", ".join(_name(table, lateness, row=item.row) for item in slow[:_SHOWN])
        more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        ratio = float(np.median([item.ratio for item in slow]))
        evidence = [f"{len(slow)} members take {ratio:.2f} times as long in phase {table.phase}: {names}{more}"]
        stages = {int(lateness.stage[item.row]) for item in slow}
        if len(stages) == 1 and -1 not in stages:
            evidence.append(f"they are the members of pipeline stage {stages.pop()}")
        evidence.append("so many, and equally late: the work is uneven, no member is at fault")
        return Finding(
            kind="imbalance",
            layer="application",
            confidence=0.7,
            evidence=tuple(evidence),
            next_probe="which layers, sequence lengths or experts do these members hold?",
        )
    worst = np.where(np.isfinite(lateness.ratio), lateness.ratio, 0.0).argmax(axis=0)
    kinds = len(np.unique(worst))
    return Finding(
        kind="imbalance",
        layer="application",
        confidence=0.75,
        evidence=(
            f"phase {table.phase}: another member is the slowest in turn ({kinds} of {len(lateness.members)})",
            "the work of a step is uneven (sequence lengths, experts, host jitter); no member is at fault",
        ),
        next_probe="sequence lengths or tokens of each member and step; does the time follow them?",
    )


def common_stall(table: TimingTable, lateness: Lateness, *, least: float) -> Finding | None:
    """All members slow down in the same steps. None if they do not."""
    together = np.nanmedian(lateness.seconds, axis=0)
    usual = float(np.nanmedian(together))
    lowest = np.nanmin(np.where(np.isfinite(lateness.seconds), lateness.seconds, np.inf), axis=0)
    floor = float(np.median(lowest))
    high = (together > least * usual) & (lowest > least * max(floor, 1e-12))
    runs = [(first, last) for first, last in runs_of(high, gap=1) if last - first >= 4]
    if not runs or usual <= 0:
        return None
    first, last = max(runs, key=lambda run: run[1] - run[0])
    ratio = float(np.nanmedian(together[first : last + 1])) / usual
    evidence = (
        f"phase {table.phase}: all {len(lateness.members)} members take {ratio:.2f} times as long, "
        f"steps {int(lateness.steps[first])} to {int(lateness.steps[last])}",
    )
    if table.phase in ("data", "checkpoint"):
        return Finding(
            kind="compute_slow",
            layer="storage",
            confidence=0.7,
            evidence=(*evidence, "all at once: what they share (storage, data service) is slow, no member"),
            next_probe="latency and throughput of the shared storage in these steps",
            cost=(ratio - 1) * usual * len(lateness.members) if table.unit_known else None,
        )
    return Finding(
        kind="undetermined",
        confidence=0.3,
        evidence=(*evidence, "in synchronous training all members show the slowest: this table cannot tell who it is"),
        next_probe="times of the phases of each member: forward, backward, data, communication",
    )


def too_little() -> Finding:
    """There are times, too few to compare."""
    return Finding(
        kind="undetermined",
        confidence=0.1,
        evidence=("fewer than two members or five steps: nothing to compare with",),
        next_probe="step times of all members over at least some dozen steps",
    )


def extra_seconds(lateness: Lateness, item: Slow) -> float:
    """Median extra time of the member per step over its peers' median, s."""
    part = slice(item.first, item.last + 1)
    seconds, ratio = lateness.seconds[item.row, part], lateness.ratio[item.row, part]
    return max(0.0, float(np.nanmedian(seconds - seconds / np.maximum(ratio, 1e-12))))


def _suspect(table: TimingTable, lateness: Lateness, *, row: int) -> Suspect:
    number = int(lateness.members[row])
    return Suspect(node=table.names[number]) if table.names else Suspect(rank=number)


def _name(table: TimingTable, lateness: Lateness, *, row: int) -> str:
    number = int(lateness.members[row])
    return table.names[number] if table.names else f"rank {number}"


def _others(table: TimingTable, lateness: Lateness, *, row: int) -> tuple[int, ...]:
    return () if table.names else tuple(int(member) for at, member in enumerate(lateness.members) if at != row)


def with_doubles_said(
    findings: Sequence[Finding], known: Sequence[tuple[TimingTable, Lateness]]
) -> tuple[Finding, ...]:
    """The findings, with members of which the tables have steps more than once as further evidence."""
    names = {
        _name(table, lateness, row=int(row)) for table, lateness in known for row in np.flatnonzero(lateness.again)
    }
    if not names:
        return tuple(findings)
    shown = ", ".join(sorted(names)[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")
    note = f"{shown}: the same steps are there more than once; each was counted once"
    return tuple(msgspec.structs.replace(finding, evidence=(*finding.evidence, note)) for finding in findings)
