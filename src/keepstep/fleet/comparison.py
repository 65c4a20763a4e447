"""Periods compared on like jobs: off, observe-only, automatic. Pure.

Runs are matched on classes (size, kind); every class counts with the GPU-hours that the two periods have in common, so
that a change in the mix of jobs is not taken for an effect.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.rates_change import CANNOT_TELL

__all__ = ["LEAST_RUNS", "Compared", "PeriodRuns", "compare_periods"]

LEAST_RUNS = 20
"""With fewer matched runs on either side the verdict is "cannot tell", whatever the interval says."""
_ROUNDS = 1000
_DRAWN_UP_TO = 300


class PeriodRuns(msgspec.Struct, frozen=True):
    """Arrays, one entry a run: class (of size and kind), what it yielded, what that is divided by.

    For kept time per allocated GPU-hour that is kept GPU-hours over allocated ones; for the share of jobs affected it
    is 0 or 1 over 1; for time saved per incident, time lost over incidents.
    """

    stratum: Any
    above: Any
    below: Any


class Compared(msgspec.Struct, frozen=True):
    """One quantity in two periods after matching, the difference `after - before` with its 95 % bootstrap interval.

    `matched_share` is the share of the later period that had a counterpart. `recovered` is the difference times what
    the later period has in `below` (GPU-hours recovered, where the quantity is kept time).
    """

    quantity: str
    before_mode: str
    after_mode: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    recovered: float
    runs_before: int
    runs_after: int
    matched_share: float
    verdict: str


def compare_periods(
    quantity: str,
    modes: tuple[str, str],
    *,
    before: PeriodRuns,
    after: PeriodRuns,
    rng: np.random.Generator,
    higher_is_better: bool = True,
) -> Compared:
    """Compare ratios of sums, standardised to the common mix of classes; runs are drawn again inside each class."""
    common = np.intersect1d(before.stratum[before.below > 0], after.stratum[after.below > 0])
    sides = [[_class(side, number) for number in common] for side in (before, after)]
    counts = [sum(len(below) for _, below in side) for side in sides]
    total = float(after.below.sum())
    if not len(common):
        return _incomparable(quantity, modes, counts=(len(before.above), len(after.above)))
    weights = np.array([min(float(one[1].sum()), float(two[1].sum())) for one, two in zip(*sides, strict=True)])
    weights /= weights.sum()
    values = [float(weights @ [above.sum() / below.sum() for above, below in side]) for side in sides]
    drawn = [_drawn(side, weights, rng=rng) for side in sides]
    low, high = (float(limit) for limit in np.quantile(drawn[1] - drawn[0], [0.025, 0.975]))
    difference = values[1] - values[0]
    matched = float(sum(below.sum() for _, below in sides[1])) / total
    return Compared(
        quantity=quantity,
        before_mode=modes[0],
        after_mode=modes[1],
        before=values[0],
        after=values[1],
        difference=difference,
        low=low,
        high=high,
        recovered=difference * total * matched,
        runs_before=counts[0],
        runs_after=counts[1],
        matched_share=matched,
        verdict=_verdict(difference, (low, high), counts=counts, higher_is_better=higher_is_better),
    )


def _incomparable(quantity: str, modes: tuple[str, str], *, counts: tuple[int, int]) -> Compared:
    nan = float("nan")
    return Compared(
        quantity=quantity,
        before_mode=modes[0],
        after_mode=modes[1],
        before=nan,
        after=nan,
        difference=nan,
        low=nan,
        high=nan,
        recovered=nan,
        runs_before=counts[0],
        runs_after=counts[1],
        matched_share=0.0,
        verdict=f"{CANNOT_TELL}: no class of jobs occurs in both periods",
    )


def _class(runs: PeriodRuns, number: int) -> tuple[Any, Any]:
    here = (runs.stratum == number) & (runs.below > 0)
    return runs.above[here], runs.below[here]


def _drawn(side: list[tuple[Any, Any]], weights: Any, *, rng: np.random.Generator) -> Any:
    """The standardised ratio, `_ROUNDS` times with runs drawn again inside each class; in large classes from the normal
    distribution with the linearised error of a ratio (Cochran 1977, section 6.4), to which that converges."""
    whole = np.zeros(_ROUNDS)
    for (above, below), weight in zip(side, weights, strict=True):
        count = len(below)
        ratio = above.sum() / below.sum()
        if count > _DRAWN_UP_TO:
            error = np.sqrt(((above - ratio * below) ** 2).sum()) / below.sum()
            whole += weight * rng.normal(ratio, error, _ROUNDS)
        else:
            picks = rng.multinomial(count, np.full(count, 1.0 / count), size=_ROUNDS)
            sums = picks @ below
            whole += weight * np.divide(picks @ above, sums, out=np.full(_ROUNDS, ratio), where=sums > 0)
    return whole


def _verdict(difference: float, interval: tuple[float, float], *, counts: list[int], higher_is_better: bool) -> str:
    if min(counts) < LEAST_RUNS:
        return f"{CANNOT_TELL}: fewer than {LEAST_RUNS} matched jobs in a period"
    if interval[0] <= 0.0 <= interval[1]:
        return CANNOT_TELL
    return "better" if (difference > 0) == higher_is_better else "worse"
