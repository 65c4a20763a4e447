"""Section of the report about failure rates of jobs: by size, over time, and beyond what was seen."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from keepstep.errors import UsageError
from keepstep.fleet.rates import Rate
from keepstep.fleet.rates_by_size import (
    fleet_rate,
    lives_between,
    projections,
    rates_by_size,
    reference_rate,
    size_curves,
)
from keepstep.fleet.rates_change import rates_between
from keepstep.fleet.rates_nodes import dispersion
from keepstep.fleet.survival import SurvivalCurve
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_sheet import Section, Sheet, sheet

__all__ = ["curve_rows", "moment_given", "rate_words", "rates_section"]

_CURVE_POINTS = 80
_DAY_US = 86_400_000_000


def rates_section(data: FleetData) -> Section:
    """Rates by size with both intervals, survival curves, the effect of dates, and projections apart."""
    lives = data.lives
    rate = fleet_rate(lives)
    spread = _monthly(data)
    words = [
        "event: an independent failure of the infrastructure (a crash loop or a second job ended by the same event is "
        "none); every other end is censored",
        f"r_f (jobs above 128 GPUs), per 1000 node-days: {rate_words(rate)}",
        f"events per week of jobs above 128 GPUs: variance to mean {_plain(spread.vmr)}, p = {spread.p_value:.2g} that "
        + (
            "it is Poisson: its intervals are too narrow, take the bootstrap's"
            if spread.interval_factor > 1
            else "it is Poisson or quieter"
        ),
    ]
    shown = (
        ("size", "{size}"),
        ("attempts", "{attempts:,}"),
        ("events", "{events:,}"),
        ("node-days", "{node_days}"),
        ("per 1000 node-days [Garwood 95 %]", "{rate} [{low}, {high}]"),
        ("[bootstrap]", "[{bootstrap_low}, {bootstrap_high}]"),
        ("MTTF h [95 %]", "{mttf_hours} [{mttf_low}, {mttf_high}]"),
        ("modelled h", "{modelled_hours}"),
        ("alive at 24 h", "{alive_24h:.4f}"),
        ("Weibull shape", "{shape:.2f}"),
    )
    rows = rates_by_size(lives, rng=data.rng(4))
    curves = size_curves(lives)
    sheets = [
        sheet(
            "rates_by_size",
            "Measured by size",
            rows=rows,
            shown=shown,
            note=f"modelled: what the rate of {reference_rate(lives)[1]} gives for the mean number of nodes; small and "
            "large jobs need not share one rate",
        ),
        sheet("survival", "Survival by size", rows=_curves(curves), drawn=True, note="hours of run time, Kaplan-Meier"),
        _projected(data, widen=spread.interval_factor),
    ]
    changes = _changes(data)
    return Section("rates", "Failure rate and MTTF", tuple(words), (*sheets, *changes))


def rate_words(rate: Rate) -> str:
    """A rate with its interval and what it rests on."""
    if math.isnan(rate.value):
        return "no exposure"
    return (
        f"{rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] at {rate.confidence:.0%} "
        f"({rate.events:,} events in {1000 * rate.exposure:,.0f})"
    )


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _monthly(data: FleetData) -> Any:
    """Dispersion of events over weeks, scaled by the exposure of each."""
    seen, lives = data.account.attempts, data.lives
    large = lives.gpus > 128
    weeks = max(1, math.ceil((data.last - data.first) / (7 * _DAY_US)))
    edges = data.first + np.arange(weeks + 1) * 7 * _DAY_US
    event = large & lives.event
    counts = np.histogram(seen.end[event], edges)[0]
    exposure = [
        float((np.clip(seen.end[large], low, high) - np.clip(seen.start[large], low, high)) @ lives.nodes[large])
        for low, high in zip(edges[:-1], edges[1:], strict=True)
    ]
    return dispersion(counts, np.array(exposure))


def curve_rows(name: str, curve: SurvivalCurve) -> list[dict[str, Any]]:
    """At most 80 points of a curve, its steps at equal distances in rank, the first and the last among them."""
    picked = np.unique(np.linspace(0, len(curve.times) - 1, min(_CURVE_POINTS, len(curve.times))).astype(int))
    points = [{"group": name, "time": 0.0, "alive": 1.0, "low": 1.0, "high": 1.0}]
    for at in picked:
        values = (curve.times[at], curve.survival[at], curve.low[at], curve.high[at])
        points.append({"group": name} | dict(zip(("time", "alive", "low", "high"), map(float, values), strict=True)))
    end = points[-1] | {"time": curve.last_time}
    return [*points, end]


def _curves(curves: tuple[tuple[str, SurvivalCurve], ...]) -> list[dict[str, Any]]:
    return [row for name, curve in curves for row in curve_rows(name, curve)]


def _projected(data: FleetData, *, widen: float) -> Sheet:
    found = projections(data.lives, widen=widen)
    which = reference_rate(data.lives)[1]
    note = f"not measured: the rate of {which}, carried beyond the largest size that had one; failures grow with nodes"
    shown = (("GPUs", "{gpus:,}"), ("projected MTTF h [95 %]", "{mttf_hours} [{mttf_low}, {mttf_high}]"))
    return sheet("projections", "PROJECTION beyond the observed sizes", rows=found, note=note, shown=shown)


def _changes(data: FleetData) -> tuple[Sheet, ...]:
    """The rate before and after each date given."""
    if not data.options.changes:
        return ()
    dates = sorted(moment_given(text) for text in data.options.changes)
    edges = [data.first, *dates, data.last]
    lives, starts = data.lives, data.account.attempts.start
    periods = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        rate = fleet_rate(lives_between(lives, starts, low=low, high=high), above_gpus=0)
        periods.append((rate.events, rate.exposure))
    labels = [datetime.fromtimestamp(date / 1e6, UTC).strftime("%Y-%m-%d %H:%M") for date in dates]
    rows = [
        {"at": change.at, "ratio": change.ratio, "low": change.low, "high": change.high}
        | {"p_value": change.p_value, "verdict": change.verdict}
        | {f"before_{name}": value for name, value in msgspec.structs.asdict(change.before).items()}
        | {f"after_{name}": value for name, value in msgspec.structs.asdict(change.after).items()}
        for change in rates_between(labels, periods)
    ]
    shown = (
        ("date (UTC)", "{at}"),
        ("before", "{before_value} [{before_low}, {before_high}]"),
        ("after", "{after_value} [{after_low}, {after_high}]"),
        ("ratio [95 %]", "{ratio:.2f} [{low:.2f}, {high:.2f}]"),
        ("p", "{p_value:.2g}"),
        ("verdict", "{verdict}"),
    )
    note = "all sizes, per 1000 node-days; a new check changes the rate that is seen, not necessarily that of faults"
    return (sheet("changes", "At the dates given", rows=rows, shown=shown, note=note),)


def moment_given(text: str) -> int:
    """A date or time in ISO format as microseconds (UTC where no zone is said). Raises UsageError."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"not a date: {text[:40]}", remedy="write it as 2025-05-01 or 2025-05-01T12:00") from error
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e6)
