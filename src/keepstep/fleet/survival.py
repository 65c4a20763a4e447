"""How long things last, with the runs that did not end by failing taken for what they are. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from scipy import optimize, special

__all__ = ["SurvivalCurve", "WeibullFit", "kaplan_meier", "survival_at", "weibull_fit"]


class SurvivalCurve(msgspec.Struct, frozen=True):
    """Arrays, one entry a time at which somebody failed: share still alive after it, its interval, number at risk.

    `subjects` counts everybody, `events` those that failed, `last_time` is where observation ends.
    """

    times: Any
    survival: Any
    low: Any
    high: Any
    at_risk: Any
    subjects: int
    events: int
    last_time: float


def kaplan_meier(durations: Any, observed: Any, *, confidence: float = 0.95) -> SurvivalCurve:
    """The product-limit estimate (Kaplan and Meier 1958) with log-log Greenwood intervals (Kalbfleisch 2002, 1.4).

    `observed` is False where a duration is only a lower bound. Of equal times failures come before censorings.
    """
    time, failed = np.asarray(durations, float), np.asarray(observed, bool)
    if not len(time):
        empty = np.empty(0)
        return SurvivalCurve(empty, empty, empty, empty, empty, 0, 0, 0.0)
    times, counts = np.unique(time[failed], return_counts=True)
    at_risk = len(time) - np.searchsorted(np.sort(time), times, side="left")
    survival = np.cumprod(1.0 - counts / at_risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(counts / (at_risk * (at_risk - counts)))
        spread = special.ndtri(0.5 + confidence / 2) * np.sqrt(variance) / np.log(survival)
        low, high = survival ** np.exp(-spread), survival ** np.exp(spread)
    low, high = np.nan_to_num(low, nan=0.0), np.nan_to_num(high, nan=1.0)
    return SurvivalCurve(times, survival, low, high, at_risk, len(time), int(failed.sum()), float(time.max()))


def survival_at(curve: SurvivalCurve, time: float) -> float:
    """The share alive just after `time`; not a number beyond the last observation."""
    if not curve.subjects or time > curve.last_time:
        return float("nan")
    index = int(np.searchsorted(curve.times, time, side="right"))
    return float(curve.survival[index - 1]) if index else 1.0


class WeibullFit(msgspec.Struct, frozen=True):
    """S(t) = exp(-(t/scale)^shape). A shape under 1: the longer it ran, the less likely it fails next."""

    shape: float
    scale: float
    events: int
    censored: int


def weibull_fit(durations: Any, observed: Any) -> WeibullFit | None:
    """Maximum likelihood with censoring on the right (Cohen 1965): the shape from its profile equation.

    Durations of 0 have no density and are left out. None with fewer than two different failure times.
    """
    time, failed = np.asarray(durations, float), np.asarray(observed, bool)
    positive = time > 0
    time, failed = time[positive], failed[positive]
    events = int(failed.sum())
    if len(np.unique(time[failed])) < 2:
        return None
    largest = float(time.max())
    logs = np.log(time / largest)
    mean_log = float(logs[failed].mean())

    def profile(shape: float) -> float:
        powers = np.exp(shape * logs)
        return float((powers * logs).sum() / powers.sum() - 1.0 / shape - mean_log)

    high = 1.0
    while profile(high) < 0 and high < 1e4:
        high *= 2.0
    if profile(high) < 0:
        return None
    shape = float(optimize.brentq(profile, 1e-4, high))
    scale = largest * float((np.exp(shape * logs).sum() / events) ** (1.0 / shape))
    return WeibullFit(shape, scale, events, len(time) - events)
