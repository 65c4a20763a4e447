"""Whether nodes fail alike: overdispersion, its test, and rates per node drawn towards the fleet's. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from scipy import optimize, special

__all__ = ["Dispersion", "Shrunk", "dispersion", "halves_correlation", "shrink"]

_TINY = 1e-12


class Dispersion(msgspec.Struct, frozen=True):
    """Counts per unit: `vmr` is variance (ddof 1) to mean, `p_value` that of a Poisson fleet being so uneven.

    `interval_factor` widens a Poisson interval: sqrt(vmr) where the test rejects at 1 %, else 1.
    """

    units: int
    mean: float
    variance: float
    vmr: float
    p_value: float
    interval_factor: float


def dispersion(counts: Any, exposure: Any = None) -> Dispersion:
    """The variance-to-mean ratio and Fisher's index-of-dispersion test: sum (k - e)^2 / e is chi2 with n - 1 degrees.

    `exposure` per unit scales what is expected of it (None: all alike). Fewer than two units, or no events, cannot
    be tested: the ratio is then not a number and p is 1.
    """
    seen = np.asarray(counts, float)
    if len(seen) < 2 or seen.sum() == 0:
        return Dispersion(len(seen), float(seen.mean()) if len(seen) else 0.0, 0.0, float("nan"), 1.0, 1.0)
    weights = np.ones(len(seen)) if exposure is None else np.asarray(exposure, float)
    alive = weights > 0
    seen, weights = seen[alive], weights[alive]
    expected = seen.sum() * weights / weights.sum()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    mean, variance = float(seen.mean()), float(seen.var(ddof=1))
    vmr = variance / mean if exposure is None else statistic / (len(seen) - 1)
    p_value = float(special.chdtrc(len(seen) - 1, statistic))
    return Dispersion(len(seen), mean, variance, vmr, p_value, float(np.sqrt(max(vmr, 1.0))) if p_value < 0.01 else 1.0)


class Shrunk(msgspec.Struct, frozen=True):
    """The gamma prior of the fleet (`shape`, `scale_exposure`: events and exposure it is worth) and each unit's rate.

    `rates` is (shape + events) / (scale_exposure + exposure); with an infinite shape all have the fleet's rate.
    """

    shape: float
    scale_exposure: float
    rates: Any


def shrink(events: Any, exposure: Any) -> Shrunk:
    """Gamma-Poisson (negative binomial) empirical Bayes: a unit's rate is drawn towards the fleet's.

    The prior's shape maximises the marginal likelihood with its mean held at the fleet's rate (Robbins 1956;
    Gelman et al., Bayesian Data Analysis, section 2.6). Where counts are no more uneven than Poisson the shape is
    infinite.
    """
    seen, time = np.asarray(events, float), np.asarray(exposure, float)
    fleet = float(seen.sum() / time.sum()) if time.sum() > 0 else 0.0
    if fleet == 0.0 or len(seen) < 2:
        return Shrunk(float("inf"), float("inf"), np.full(len(seen), fleet))

    def loss(log_shape: float) -> float:
        shape = np.exp(log_shape)
        share = shape / (shape + fleet * time)
        terms = special.gammaln(shape + seen) - special.gammaln(shape) + shape * np.log(share)
        return -float((terms + seen * np.log(np.maximum(1.0 - share, _TINY))).sum())

    found = optimize.minimize_scalar(loss, bounds=(-8.0, 12.0), method="bounded")
    shape = float(np.exp(found.x))
    if found.x > 11.0:
        return Shrunk(float("inf"), float("inf"), np.full(len(seen), fleet))
    return Shrunk(shape, shape / fleet, (shape + seen) / (shape / fleet + time))


def halves_correlation(first: Any, second: Any) -> float:
    """Pearson's correlation of the counts per node in two halves: near 0 where risk is no fixed trait of a node."""
    one, two = np.asarray(first, float), np.asarray(second, float)
    if len(one) < 2 or one.std() == 0 or two.std() == 0:
        return float("nan")
    return float(np.corrcoef(one, two)[0, 1])
