"""Whether a rate changed: two Poisson rates compared exactly, at dates given. Pure.

A new health check changes the rate that is seen, not necessarily the rate of faults; so dates are given and a change
is said to be of the apparent rate.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.fleet.rates import Rate, rate_of

__all__ = ["CANNOT_TELL", "Change", "rate_ratio", "rates_between"]

CANNOT_TELL = "cannot tell"
"""The verdict where the interval holds both answers."""


class Change(msgspec.Struct, frozen=True):
    """Rates of the period before and after `at` (a label), after over before with its interval, and the verdict."""

    at: str
    before: Rate
    after: Rate
    ratio: float
    low: float
    high: float
    p_value: float
    verdict: str


def rate_ratio(before: tuple[int, float], after: tuple[int, float], *, confidence: float = 0.95) -> tuple[float, ...]:
    """(ratio, low, high, p) of two Poisson rates given as (events, exposure): exact, conditional on the total.

    Given all events those after are binomial (Przyborowski and Wilenski 1940); limits by Clopper and Pearson (1934).
    """
    (first, first_time), (second, second_time) = before, after
    if first + second == 0 or first_time <= 0 or second_time <= 0:
        return float("nan"), 0.0, float("inf"), 1.0
    from scipy import stats  # loading it takes a second, and most reports compare no dates

    total, tail = first + second, (1.0 - confidence) / 2.0
    low = float(stats.beta.ppf(tail, second, total - second + 1)) if second else 0.0
    high = float(stats.beta.ppf(1.0 - tail, second + 1, total - second)) if first else 1.0
    p_value = float(stats.binomtest(second, total, second_time / (first_time + second_time)).pvalue)
    scale = first_time / second_time
    value = second / first * scale if first else float("inf")
    return value, _odds(low) * scale, _odds(high) * scale, p_value


def _odds(share: float) -> float:
    return share / (1.0 - share) if share < 1.0 else float("inf")


def rates_between(
    labels: Sequence[str], periods: Sequence[tuple[int, float]], *, confidence: float = 0.95
) -> tuple[Change, ...]:
    """Compare neighbouring periods (events, exposure); `labels` name the dates between them, one less."""
    changes = []
    for label, before, after in zip(labels, periods[:-1], periods[1:], strict=True):
        ratio, low, high, p_value = rate_ratio(before, after, confidence=confidence)
        verdict = CANNOT_TELL if low <= 1.0 <= high else "higher after" if ratio > 1 else "lower after"
        rates = rate_of(*before, confidence=confidence), rate_of(*after, confidence=confidence)
        changes.append(Change(label, *rates, ratio, low, high, p_value, verdict))
    return tuple(changes)
