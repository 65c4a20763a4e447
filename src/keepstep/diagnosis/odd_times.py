"""Times in a table that need a word of their own: another unit for some members, pauses, a start-up left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from keepstep.diagnosis.hang_words import listed
from keepstep.diagnosis.lateness import Lateness
from keepstep.records.timing_table import TimingTable

__all__ = ["in_one_unit", "pauses_of", "share_of"]

_WORKING = ("step", "compute", "forward", "backward", "optimizer")
"""Phases in which nobody takes a thousand times as long as the others."""
_UNITS = (1e3, 1e6, 1e9)
_NEAR = 2.0
_PAUSE = 5.0
_SHOWN = 4


def in_one_unit(tables: Sequence[TimingTable]) -> tuple[list[TimingTable], tuple[str, ...]]:
    """The tables with the times of all members in one unit, and what is to be said of those that had another."""
    notes: dict[str, None] = {}
    united = []
    for table in tables:
        members, row = np.unique(table.who, return_inverse=True)
        if table.phase not in _WORKING or len(members) < 2 or not len(row):
            united.append(table)
            continue
        factors = _factors(np.array([np.median(table.seconds[row == number]) for number in range(len(members))]))
        for factor in sorted({one for one in factors.tolist() if one > 1}):
            odd = [int(member) for member in members[factors == factor]]
            who = ", ".join(table.names[one] for one in odd[:_SHOWN]) if table.names else listed(odd)
            said = (
                f"{who}: the times in phase {table.phase} are some {factor:.0f} times those of the others, as if they "
                "were in another unit (ms beside s); they were brought to one unit"
            )
            notes[said] = None
        united.append(replace(table, seconds=table.seconds / factors[row]) if (factors > 1).any() else table)
    return united, tuple(notes)


def _factors(usual: np.ndarray) -> np.ndarray:
    """By how much the usual time of each member is another unit than the smallest that at least one has."""
    found = np.ones(len(usual))
    positive = usual[usual > 0]
    if not len(positive):
        return found
    ratio = usual / np.sort(positive)[(len(positive) - 1) // 2]
    if ratio.max() < _UNITS[0] / _NEAR:
        ratio = usual / positive.min()
    for unit in _UNITS:
        found[(ratio > unit / _NEAR) & (ratio < unit * _NEAR)] = unit
    return found


def share_of(table: TimingTable, tables: Sequence[tuple[TimingTable, Lateness]]) -> float:
    """Which share of a step a phase usually takes, as far as the tables of the job tell."""
    usual = {one.phase: float(np.nanmedian(lateness.seconds)) for one, lateness in tables}
    whole = usual.get("step") or sum(usual.values())
    return min(1.0, usual.get(table.phase, 0.0) / whole) if whole > 0 else 1.0


def pauses_of(table: TimingTable, lateness: Lateness, *, share: float) -> Iterator[str]:
    """Single steps that took members far longer than usual; nobody is at fault by them, and they cost time.

    A phase that takes a small `share` of a step has to take as long as a whole one.
    """
    usual = np.nanmedian(lateness.seconds, axis=1)
    ratio = np.nan_to_num(lateness.seconds / np.maximum(usual, 1e-12)[:, None])
    high = ratio > max(_PAUSE, 1 + 1 / max(share, 1e-6))
    if lateness.warm_up > 0:
        longer = f"{lateness.warm_up:.0f} times as long"
        yield f"phase {table.phase}: the first step takes {longer} and was left out, as start-up"
    together = high.sum(axis=0) * 2 > len(lateness.members)
    if together.any():
        yield _pause("all members", lateness, chosen=together, ratio=float(ratio[:, together].max()), phase=table.phase)
    for row in np.flatnonzero((high & ~together).any(axis=1))[:_SHOWN].tolist():
        number = int(lateness.members[row])
        who = table.names[number] if table.names else f"rank {number}"
        mine = high[row] & ~together
        yield _pause(who, lateness, chosen=mine, ratio=float(ratio[row, mine].max()), phase=table.phase)


def _pause(who: str, lateness: Lateness, *, chosen: np.ndarray, ratio: float, phase: str) -> str:
    steps = lateness.steps[chosen].tolist()
    gaps = set(np.diff(steps).tolist())
    often = f", every {gaps.pop()} steps" if len(steps) > 2 and len(gaps) == 1 else ""
    shown = ", ".join(map(str, steps[:_SHOWN])) + (", ..." if len(steps) > _SHOWN else "")
    return (
        f"phase {phase}: {who} paused in {len(steps)} of {len(lateness.steps)} steps ({shown}{often}), for up to "
        f"{ratio:.0f} times the usual time: a checkpoint, compilation or validation would look so"
    )
