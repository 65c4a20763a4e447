"""Failure rate and MTTF by size of job, measured, modelled and projected, each printed as what it is. Pure.

An event is an independent failure of the infrastructure; every other end, and running on, is censored on the right.
Exposure is run time x nodes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.rates import HOURS_PER_DAY, Rate, bootstrap_rate, mttf_hours, rate_of
from keepstep.fleet.sizes import LARGEST_SMALL_GPUS, SIZES, size_class, size_top
from keepstep.fleet.survival import SurvivalCurve, kaplan_meier, survival_at, weibull_fit

__all__ = [
    "Lives",
    "Projection",
    "SizeRate",
    "fleet_rate",
    "lives_between",
    "projections",
    "rates_by_size",
    "reference_rate",
    "size_curves",
]

_DAY_US = 86_400_000_000
_THOUSAND = 1000.0


class Lives(msgspec.Struct, frozen=True):
    """Arrays, one entry an attempt: its run (equal numbers stand together), GPUs, nodes, length [us], event or not."""

    run: Any
    gpus: Any
    nodes: Any
    length: Any
    event: Any

    def chosen(self, which: Any) -> Lives:
        """The entries where `which` holds."""
        return Lives(*(getattr(self, field)[which] for field in self.__struct_fields__))

    @property
    def node_days(self) -> Any:
        """Exposure of each attempt in node-days."""
        return self.length / _DAY_US * self.nodes


class SizeRate(msgspec.Struct, frozen=True):
    """One class of sizes. Rates are per 1000 node-days with Garwood and bootstrap (over runs) limits.

    `mttf_hours` is job-hours per event with its Garwood limits; infinite without events. `modelled_hours` is what
    `reference_rate` gives for the mean number of nodes. `alive_24h` is Kaplan-Meier's share of attempts
    alive after a day, `shape` the Weibull shape (None: too few events).
    """

    size: str
    attempts: int
    events: int
    node_days: float
    rate: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    mttf_hours: float
    mttf_low: float
    mttf_high: float
    modelled_hours: float
    alive_24h: float
    shape: float | None


def fleet_rate(lives: Lives, *, above_gpus: int = LARGEST_SMALL_GPUS, confidence: float = 0.95) -> Rate:
    """r_f: events of jobs with more than `above_gpus` GPUs per 1000 node-days (Meta, HPCA 2025, section 3)."""
    large = lives.chosen(lives.gpus > above_gpus)
    return rate_of(int(large.event.sum()), float(large.node_days.sum()) / _THOUSAND, confidence=confidence)


def reference_rate(lives: Lives) -> tuple[Rate, str]:
    """The rate that models are made of, and which it is: r_f, or that of all sizes where no large job had an event."""
    large = fleet_rate(lives)
    if large.events:
        return large, f"jobs above {LARGEST_SMALL_GPUS} GPUs (r_f)"
    return fleet_rate(lives, above_gpus=0), f"jobs of all sizes (no event above {LARGEST_SMALL_GPUS} GPUs)"


def rates_by_size(lives: Lives, *, rng: np.random.Generator) -> tuple[SizeRate, ...]:
    """A row for each class of sizes that occurs."""
    classes = size_class(lives.gpus)
    model = reference_rate(lives)[0]
    return tuple(
        _row(int(number), lives.chosen(classes == number), model=model, rng=rng) for number in np.unique(classes)
    )


def _row(number: int, lives: Lives, *, model: Rate, rng: np.random.Generator) -> SizeRate:
    exposure, events = float(lives.node_days.sum()), int(lives.event.sum())
    rate = rate_of(events, exposure / _THOUSAND)
    job_hours = float(lives.length.sum()) / _DAY_US * HOURS_PER_DAY
    per_hour = rate_of(events, job_hours)
    boot = bootstrap_rate(*_by_run(lives), rng=rng)
    hours = lives.length / _DAY_US * HOURS_PER_DAY
    fit = weibull_fit(hours, lives.event)
    nodes = exposure / (job_hours / HOURS_PER_DAY) if job_hours else float("nan")
    return SizeRate(
        size=SIZES[number],
        attempts=len(lives.run),
        events=events,
        node_days=exposure,
        rate=rate.value,
        low=rate.low,
        high=rate.high,
        bootstrap_low=boot[0],
        bootstrap_high=boot[1],
        mttf_hours=_inverse(per_hour.value),
        mttf_low=_inverse(per_hour.high),
        mttf_high=_inverse(per_hour.low),
        modelled_hours=mttf_hours(nodes, model.value / _THOUSAND, gpus_per_node=1),
        alive_24h=survival_at(kaplan_meier(hours, lives.event), 24.0),
        shape=fit.shape if fit else None,
    )


def _by_run(lives: Lives) -> tuple[Any, Any]:
    """Events and exposure (1000 node-days) of each run: lives of one run are no independent draws."""
    first = np.flatnonzero(np.append(True, lives.run[1:] != lives.run[:-1]))
    exposure = np.add.reduceat(lives.node_days, first) / _THOUSAND
    return np.add.reduceat(lives.event.astype(float), first), exposure


def _inverse(value: float) -> float:
    return 1.0 / value if value > 0 else float("inf")


def size_curves(lives: Lives, *, least_events: int = 5) -> tuple[tuple[str, SurvivalCurve], ...]:
    """Kaplan-Meier over hours of run time, for each class of sizes with enough events."""
    classes = size_class(lives.gpus)
    found = []
    for number in np.unique(classes):
        part = lives.chosen(classes == number)
        if part.event.sum() >= least_events:
            found.append((SIZES[int(number)], kaplan_meier(part.length / _DAY_US * HOURS_PER_DAY, part.event)))
    return tuple(found)


class Projection(msgspec.Struct, frozen=True):
    """MTTF at a size nobody ran, from `reference_rate` and its interval: a projection, not a measurement."""

    gpus: int
    mttf_hours: float
    mttf_low: float
    mttf_high: float


def projections(lives: Lives, *, largest: int = 131_072, widen: float = 1.0) -> tuple[Projection, ...]:
    """For each doubling beyond the largest size with an event, up to `largest` GPUs. Empty without any event.

    `widen` stretches the interval's half-widths (by sqrt of the variance-to-mean ratio, where that is above 1).
    """
    model = reference_rate(lives)[0]
    if not model.events:
        return ()
    low = max(model.value - widen * (model.value - model.low), 1e-12) / _THOUSAND
    high = (model.value + widen * (model.high - model.value)) / _THOUSAND
    seen = size_top(int(size_class(lives.gpus[lives.event].max())))
    sizes = [gpus for gpus in (8 * 2**power for power in range(18)) if seen < gpus <= largest]
    return tuple(
        Projection(gpus, mttf_hours(gpus, model.value / _THOUSAND), mttf_hours(gpus, high), mttf_hours(gpus, low))
        for gpus in sizes
    )


def lives_between(lives: Lives, starts: Any, *, low: int, high: int) -> Lives:
    """The parts of the lives inside [low, high) us; an event counts where the life ends inside. Empty parts go."""
    begin = np.clip(starts, low, high)
    end = np.clip(starts + lives.length, low, high)
    ends_inside = (starts + lives.length > low) & (starts + lives.length <= high)
    part = Lives(lives.run, lives.gpus, lives.nodes, end - begin, lives.event & ends_inside)
    return part.chosen((end > begin) | part.event)
