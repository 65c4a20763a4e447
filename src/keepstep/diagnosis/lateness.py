"""How late each member is against its peers of the same role, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from keepstep.records.timing_table import TimingTable

__all__ = ["Lateness", "lateness_of", "runs_of"]

_MOST_CELLS = 40_000_000
"""Members times steps that are looked at; of longer tables the newest steps."""
_WARM_UP = 1.5
"""A first step this many times as long as the median of the rest is compilation and set-up, and left out."""
_FEWEST_PEERS = 2

_Matrix: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Lateness:
    """Times and their ratio to the peers' median; rows are members, columns steps, NaN where nothing is known."""

    members: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    seconds: _Matrix
    ratio: _Matrix
    """Time over the lower median of the peers in the same step (of two peers: over the faster one)."""
    role: npt.NDArray[np.int64]
    """Number of the role of each member; members of one role are peers."""
    by_role: bool
    """Whether roles came from coordinates (and had enough members to be compared within)."""
    stage: npt.NDArray[np.int64]
    """Pipeline stage of each member, -1 if unknown."""
    noise: float
    """Robust standard deviation of a single ratio around its member's median."""
    again: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Members of which the table has some steps more than once."""
    warm_up: float = 0.0
    """How many times as long as usual the first step took that was left out; 0: none was."""


def lateness_of(table: TimingTable) -> Lateness | None:
    """Lateness by the rows of the table; None if it has fewer than two members or no times.

    If a member reports a step more than once, the times are added (phases of micro-batches); if it does so
    twice as often as is usual for its peers, or any other multiple, it is taken to have reported it again.
    """
    members, row = np.unique(table.who, return_inverse=True)
    steps, column = np.unique(table.step, return_inverse=True)
    if len(members) < 2 or not len(steps):
        return None
    keep = max(1, _MOST_CELLS // len(members))
    if len(steps) > keep:
        chosen = column >= len(steps) - keep
        row, column, steps = row[chosen], column[chosen] - (len(steps) - keep), steps[-keep:]
        values = table.seconds[chosen]
    else:
        chosen = np.ones(len(row), dtype=bool)
        values = table.seconds
    cells = row * len(steps) + column
    shape = len(members), len(steps)
    sums = np.bincount(cells, weights=values, minlength=shape[0] * shape[1]).reshape(shape)
    counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    role, stage, by_role = _roles(table, members)
    times = _times_reported(counts, role)
    seconds = np.where(counts > 0, sums / times, np.nan)
    seconds, steps, warm_up = _without_warm_up(seconds, steps)
    ratio = np.full_like(seconds, np.nan)
    for number in np.unique(role):
        peers = role == number
        ratio[peers] = seconds[peers] / np.maximum(_lower_median(seconds[peers]), 1e-12)
    deviation = np.abs(ratio - _median(ratio, axis=1)[:, None])
    noise = 1.4826 * float(np.nanmedian(deviation)) if np.isfinite(deviation).any() else 0.0
    return Lateness(members, steps, seconds, ratio, role, by_role, stage, noise, (times > 1).any(axis=1), warm_up)


def _times_reported(counts: npt.NDArray[np.int64], role: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each step of each member is in the table, against what is usual for its peers."""
    times = np.ones_like(counts)
    if counts.max() <= 1:
        return times
    for number in np.unique(role):
        peers = role == number
        mine = counts[peers]
        known = np.sort(mine[mine > 0])
        usual = known[(len(known) - 1) // 2] if len(known) else 1
        times[peers] = np.where((mine > usual) & (mine % usual == 0), mine // usual, 1)
    return times


def runs_of(flags: npt.NDArray[np.bool_], gap: int) -> list[tuple[int, int]]:
    """(first, last) index of each run of True, where runs at most `gap` apart are one."""
    at = np.flatnonzero(flags)
    if not len(at):
        return []
    cuts = np.flatnonzero(np.diff(at) > gap + 1)
    firsts = np.concatenate(([at[0]], at[cuts + 1]))
    lasts = np.concatenate((at[cuts], [at[-1]]))
    return [(int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]


def _without_warm_up(seconds: _Matrix, steps: npt.NDArray[np.int64]) -> tuple[_Matrix, npt.NDArray[np.int64], float]:
    """The times without the first step, if that is far longer than the others on most members; and how much longer."""
    if len(steps) < 5:
        return seconds, steps, 0.0
    usual = float(np.nanmedian(seconds[:, 1:]))
    first = seconds[:, 0]
    if np.isfinite(first).any() and float(np.nanmedian(first)) > _WARM_UP * usual:
        return seconds[:, 1:], steps[1:], float(np.nanmedian(first)) / max(usual, 1e-12)
    return seconds, steps, 0.0


def _roles(
    table: TimingTable, members: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
    """Role and stage of each member, and whether every role has enough members to compare within."""
    stage = _of_members(table, members, axis="stage")
    axes = [axis for axis in ("stage", "tp", "ep") if axis in table.coordinates]
    if not axes:
        return np.zeros(len(members), dtype=np.int64), stage, False
    for chosen in (axes, axes[:1]):
        labels = np.stack([_of_members(table, members, axis=axis) for axis in chosen])
        _, role, sizes = np.unique(labels, axis=1, return_inverse=True, return_counts=True)
        if sizes.min() >= _FEWEST_PEERS:
            return role.reshape(-1).astype(np.int64), stage, True
    return np.zeros(len(members), dtype=np.int64), stage, False


def _of_members(table: TimingTable, members: npt.NDArray[np.int64], *, axis: str) -> npt.NDArray[np.int64]:
    """The coordinate of each member, -1 if the table has none."""
    found = np.full(len(members), -1, dtype=np.int64)
    if axis in table.coordinates:
        found[np.searchsorted(members, table.who)] = table.coordinates[axis]
    return found


def _median(values: _Matrix, axis: int) -> _Matrix:
    """Median without NaN; NaN where there is nothing."""
    empty = ~np.isfinite(values).any(axis=axis)
    filled = np.where(np.expand_dims(empty, axis), 1.0, values)
    return np.where(empty, np.nan, np.nanmedian(filled, axis=axis))


def _lower_median(values: _Matrix) -> _Matrix:
    """For each column the value in the middle, the lower one of two; NaN where there is nothing."""
    ordered = np.sort(values, axis=0)
    known = np.isfinite(ordered).sum(axis=0)
    middle = np.maximum(known - 1, 0) // 2
    return np.where(known > 0, np.take_along_axis(ordered, middle[None, :], axis=0)[0], np.nan)
