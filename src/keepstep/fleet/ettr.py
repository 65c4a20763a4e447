"""Effective training time ratio, expected: productive time of a job run over its wall-clock, in three forms. Pure.

Wall-clock is queue + productive + unproductive (work done again since the last checkpoint, restart, set-up). All
times are minutes; any other unit works if it is the same everywhere. The definition is that of Meta, HPCA 2025,
section 4; the exact forms follow from renewal at each checkpoint with exponential failures.
"""

from __future__ import annotations

import math

import msgspec

__all__ = ["DEFINITIONS", "Training", "daly", "exact", "failure_free_minutes", "finite", "published", "young"]

DEFINITIONS = {
    "measured": "productive GPU time / (queue + allocated) GPU time of job runs, from the ledger",
    "published": "(1 - N r (u + dt/2)) / (1 + w/dt), first order in failures, no queue (Meta, HPCA 2025)",
    "exact": "dt / ((M + q) A (e^((dt+w)/M) - 1)), A = e^(u/M); failures also hit restarts and checkpoint writes",
    "finite": "R / E[W] of a run with R productive minutes, the first queue and start-up counted",
}
"""What each form of the ratio means, printed with its number."""

_LARGEST_EXPONENT = 700.0


class Training(msgspec.Struct, frozen=True):
    """How a job runs: `mean_minutes` between failures (M), checkpoint every `interval` (dt), start-up `startup` (u0).

    `write` (w) is how long the job stands still for a checkpoint, `queue` (q) the wait after a failure.
    """

    mean_minutes: float
    interval: float
    startup: float = 5.0
    write: float = 0.0
    queue: float = 0.0


def failure_free_minutes(gpus: float, per_node_day: float, *, gpus_per_node: int = 8) -> float:
    """M = 1 / (N r): mean minutes between failures of a job on `gpus` at `per_node_day` failures a node-day."""
    daily = gpus / gpus_per_node * per_node_day
    return 1440.0 / daily if daily > 0 else math.inf


def published(training: Training) -> float:
    """(1 - N r (u0 + dt/2)) / (1 + w/dt): Meta, HPCA 2025, equation 2, without queue; may fall below 0."""
    lost = (training.startup + training.interval / 2.0) / training.mean_minutes
    return (1.0 - lost) / (1.0 + training.write / training.interval)


def exact(training: Training) -> float:
    """dt / ((M + q) A (e^((dt+w)/M) - 1)), A = e^(u0/M): renewal at each checkpoint, endless run.

    Failures are exponential and may hit restarts and checkpoint writes, none while queued. 0 where the run can
    never reach its next checkpoint in floating point.
    """
    cost = _segment_minutes(training)
    return training.interval / cost if not math.isinf(cost) else 0.0


def finite(training: Training, productive_minutes: float) -> float:
    """R / E[W], E[W] = q + (M + q)(A - 1) + (R/dt) (M + q) A (e^((dt+w)/M) - 1), for R productive minutes.

    Counts the first queue and start-up and charges a write after the last segment; exact where R is a multiple of
    the interval.
    """
    mean, queue = training.mean_minutes, training.queue
    first = queue + (training.startup if math.isinf(mean) else (mean + queue) * _grown(training.startup / mean))
    total = first + productive_minutes / training.interval * _segment_minutes(training)
    return productive_minutes / total if not math.isinf(total) else 0.0


def _segment_minutes(training: Training) -> float:
    """Expected minutes of one checkpoint interval with all its failures."""
    mean = training.mean_minutes
    span = training.interval + training.write
    if math.isinf(mean):
        return span
    return (mean + training.queue) * (_grown(training.startup / mean) + 1.0) * _grown(span / mean)


def _grown(exponent: float) -> float:
    return math.expm1(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def young(write: float, mean_minutes: float) -> float:
    """The checkpoint interval sqrt(2 w M) (Young 1974)."""
    return math.sqrt(2.0 * write * mean_minutes)


def daly(write: float, mean_minutes: float) -> float:
    """Daly's higher-order interval (Daly 2006, eq. 37): sqrt(2dM) [1 + sqrt(d/2M)/3 + (d/2M)/9] - d; M if d >= 2M."""
    if write >= 2.0 * mean_minutes:
        return mean_minutes
    ratio = write / (2.0 * mean_minutes)
    return math.sqrt(2.0 * write * mean_minutes) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - write
