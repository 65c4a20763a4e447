"""How often things fail, with the interval that the number of failures allows. Pure: counts in, numbers out.

Exposure is time at risk in any unit (node-days here); a rate is events per that unit. Time of jobs that ended for
another reason counts as exposure and as no event: it is censored on the right.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from scipy import special

__all__ = ["GPUS_PER_NODE", "HOURS_PER_DAY", "Rate", "bootstrap_rate", "garwood", "mttf_hours", "rate_of"]

GPUS_PER_NODE = 8
HOURS_PER_DAY = 24.0


class Rate(msgspec.Struct, frozen=True):
    """`events` in `exposure`: `value` per unit of exposure, within [`low`, `high`] at `confidence`."""

    events: int
    exposure: float
    value: float
    low: float
    high: float
    confidence: float


def garwood(events: int, exposure: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a Poisson rate (Garwood 1936): chi2(a/2, 2k)/2T and chi2(1-a/2, 2k+2)/2T.

    A quantile of chi2 is twice that of the gamma distribution with half the degrees of freedom.
    `a/2` is used on the upper side also for no events. Infinite where there is no exposure.
    """
    if exposure <= 0:
        return 0.0, float("inf")
    tail = (1.0 - confidence) / 2.0
    low = float(special.gammaincinv(events, tail)) / exposure if events else 0.0
    return low, float(special.gammaincinv(events + 1, 1.0 - tail)) / exposure


def rate_of(events: int, exposure: float, *, confidence: float = 0.95) -> Rate:
    """The rate with its Garwood interval; the value is not a number where there is no exposure."""
    low, high = garwood(events, exposure, confidence=confidence)
    value = events / exposure if exposure > 0 else float("nan")
    return Rate(events, exposure, value, low, high, confidence)


def mttf_hours(gpus: float, per_node_day: float, *, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Hours to the first failure of a job on `gpus`: a series system, 1 / (nodes x rate) (Meta, HPCA 2025, section 3).

    `per_node_day` is failures per node-day. Infinite at a rate of 0.
    """
    hourly = gpus / gpus_per_node * per_node_day / HOURS_PER_DAY
    return 1.0 / hourly if hourly > 0 else float("inf")


def bootstrap_rate(
    events: Any, exposure: Any, *, rng: np.random.Generator, rounds: int = 1000, confidence: float = 0.95
) -> tuple[float, float]:
    """The percentile interval of sum(events)/sum(exposure) when whole units (nodes, jobs) are drawn again.

    Keeps what a Poisson interval loses: that failures come in bursts on the same unit (Efron and Tibshirani 1993,
    chapter 13). Units are drawn by multinomial counts over distinct (events, exposure) pairs, so that a million
    units cost no more than their few distinct pairs.
    """
    pairs = np.stack([np.asarray(events, float), np.asarray(exposure, float)], axis=1)
    if not len(pairs) or pairs[:, 1].sum() <= 0:
        return 0.0, float("inf")
    distinct, counts = _distinct(pairs)
    drawn = rng.multinomial(len(pairs), counts / len(pairs), size=rounds)
    sums = drawn @ distinct
    rates = np.divide(sums[:, 0], sums[:, 1], out=np.full(rounds, np.nan), where=sums[:, 1] > 0)
    tail = (1.0 - confidence) / 2.0
    low, high = np.nanquantile(rates, [tail, 1.0 - tail])
    return float(low), float(high)


_MOST_PAIRS = 1024


def _distinct(pairs: Any) -> tuple[Any, Any]:
    """The pairs to draw from and how many units each stands for; many pairs become groups by events and exposure.

    A group is replaced by its mean pair, which leaves the estimate unchanged and the spread within the groups out
    (their exposures are neighbours in order, so little is lost).
    """
    if len(pairs) <= _MOST_PAIRS:
        return pairs, np.ones(len(pairs))
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    edges = np.unique(np.linspace(0, len(pairs), _MOST_PAIRS + 1).astype(np.int64)[:-1])
    counts = np.diff(np.append(edges, len(pairs)))
    return np.add.reduceat(pairs[order], edges, axis=0) / counts[:, None], counts
