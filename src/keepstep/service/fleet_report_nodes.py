"""Section of the report about nodes: fault rates, whether they fail alike, episodes, repair."""

from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.fleet.episodes import Faults, again_within, episode_effect, start_gaps, time_down
from keepstep.fleet.rates import rate_of
from keepstep.fleet.rates_nodes import dispersion, halves_correlation, shrink
from keepstep.fleet.survival import kaplan_meier, survival_at, weibull_fit
from keepstep.service.fleet_report_data import FleetData
from keepstep.service.fleet_report_faults import NodeFaults
from keepstep.service.fleet_report_rates import curve_rows, rate_words
from keepstep.service.fleet_sheet import Section, Sheet, sheet

__all__ = ["nodes_section"]

_GAPS_DAYS = (0.0, 0.25, 1.0, 7.0)
_MOST_CLASSES = 12
_AGAIN_DAYS = 28.0


def nodes_section(data: FleetData, known: NodeFaults) -> Section:
    """What the record of node faults says by itself."""
    faults = known.faults
    if not len(faults.node) or not known.horizon:
        return Section("nodes", "Faults of nodes", ("no fault of a node is recorded",))
    exposure = known.nodes * known.horizon / 1000.0
    counts = np.bincount(faults.node, minlength=known.nodes)
    spread = dispersion(counts)
    early = faults.start < known.horizon / 2
    halves = [np.bincount(faults.node[part], minlength=known.nodes) for part in (early, ~early)]
    again, judged = again_within(faults, _AGAIN_DAYS, horizon=known.horizon)
    down = time_down(faults)
    mean = rate_of(len(faults.node), exposure).value
    chance = 1.0 - np.exp(-mean / 1000.0 * _AGAIN_DAYS)
    repair = faults.end - faults.start
    words = (
        known.said,
        f"per 1000 node-days: {rate_words(rate_of(len(faults.node), exposure, confidence=0.9))}",
        f"faults per node: mean {spread.mean:.2f}, variance to mean {_plain(spread.vmr, 2)} (p = {spread.p_value:.2g} "
        f"that all fail alike); widen Poisson intervals by {spread.interval_factor:.2f}",
        f"first half against second half, per node: correlation {_plain(halves_correlation(*halves), 2)} (near 0: "
        f"bursts, no fixed trait of a node)",
        f"another fault on the node within {_AGAIN_DAYS:.0f} days of a fault: {again} of {judged} "
        f"({_plain(again / judged if judged else float('nan'), 3)}; {chance:.3f} if faults were independent)",
        f"repair in days: mean {repair.mean():.2f}, median {np.median(repair):.2f}, p90 "
        f"{np.quantile(repair, 0.9):.2f}, longest {repair.max():.2f}; {int((repair <= 0).sum())} of zero length; "
        f"{down:,.1f} node-days down, {1 - down / (known.nodes * known.horizon):.2%} available",
    )
    return Section(
        "nodes",
        "Faults of nodes",
        words,
        (_rates(known, exposure), *_gaps(known), _episodes(known), _worst(known, counts)),
    )


def _plain(value: float, digits: int) -> str:
    """`value` with so many digits; a dash where it is not known."""
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def _rates(known: NodeFaults, exposure: float) -> Sheet:
    rows = []
    for name, column in (("level", known.level), ("class", known.kind)):
        values, counts = np.unique(column.astype(str), return_counts=True)
        for at in np.argsort(-counts, kind="stable")[:_MOST_CLASSES]:
            rate = rate_of(int(counts[at]), exposure, confidence=0.9)
            rows.append({"by": name, "value": str(values[at]) or "(none)", "faults": rate.events} | _limits(rate))
    shown = (
        ("by", "{by}"),
        ("", "{value}"),
        ("faults", "{faults:,}"),
        ("per 1000 node-days [90 %]", "{rate:.3f} [{low:.3f}, {high:.3f}]"),
    )
    return sheet("fault_rates", "Rates by level and class", rows=rows, shown=shown)


def _limits(rate: Any) -> dict[str, float]:
    return {"rate": rate.value, "low": rate.low, "high": rate.high}


def _gaps(known: NodeFaults) -> tuple[Sheet, Sheet]:
    """Days from fault to fault on a node, in both ways of counting."""
    rows, drawn = [], []
    ways = (("from fault to fault", None), ("with day 0 as origin of every node", known.nodes))
    for way, origin in ways:
        gaps = start_gaps(known.faults, horizon=known.last, origin_nodes=origin)
        curve, fit = kaplan_meier(gaps.days, gaps.observed), weibull_fit(gaps.days, gaps.observed)
        alive = {f"alive_{day}d": survival_at(curve, day) for day in (7, 28, 90, 180)}
        shape = {"shape": fit.shape if fit else None, "scale_days": fit.scale if fit else None}
        rows.append({"way": way, "gaps": curve.subjects, "observed": curve.events} | alive | shape)
        drawn += curve_rows(way, curve)
    shown = (
        ("", "{way}"),
        ("gaps", "{gaps:,}"),
        ("observed", "{observed:,}"),
        *((f"S({day} d)", f"{{alive_{day}d:.3f}}") for day in (7, 28, 90, 180)),
        ("Weibull shape", "{shape:.3f}"),
        ("scale d", "{scale_days:.1f}"),
    )
    note = f"Kaplan-Meier, the last gap of a node censored at day {known.last:g}; shape under 1: faults come in bursts"
    return (
        sheet("fault_gaps", "Time to the next fault of a node", rows=rows, shown=shown, note=note),
        sheet("fault_survival", "Time to the next fault of a node (days)", rows=drawn, drawn=True),
    )


def _episodes(known: NodeFaults) -> Sheet:
    rows = [episode_effect(known.faults, gap, nodes=known.nodes, horizon=known.last) for gap in _GAPS_DAYS]
    shown = (
        ("merged within days", "{gap:g}"),
        ("episodes", "{episodes:,}"),
        ("per 1000 up-days", "{per_1000_up_days:.3f}"),
        ("variance to mean", "{vmr:.2f}"),
    )
    note = "the same faults, merged where the next begins at most so long after all earlier ones ended"
    return sheet("episodes", "Episodes: what merging does", rows=rows, shown=shown, note=note)


def _worst(known: NodeFaults, counts: Any) -> Sheet:
    """Nodes with the highest rates after shrinkage."""
    up = np.full(known.nodes, known.last)
    merged = Faults(known.faults.node, known.faults.start, known.faults.end)
    np.subtract.at(up, merged.node, np.minimum(merged.end - merged.start, known.last))
    found = shrink(counts, np.maximum(up, 1.0))
    worst = np.lexsort((np.arange(known.nodes), -found.rates))[:10]
    rows = [
        {
            "node": known.names[at] if at < len(known.names) else f"#{at}",
            "faults": int(counts[at]),
            "raw": 1000.0 * float(counts[at] / max(up[at], 1.0)),
            "shrunk": 1000.0 * float(found.rates[at]),
        }
        for at in worst
        if counts[at]
    ]
    shown = (
        ("node", "{node}"),
        ("faults", "{faults:,}"),
        ("raw per 1000 up-days", "{raw:.2f}"),
        ("shrunk", "{shrunk:.2f}"),
    )
    note = f"gamma-Poisson: a node's rate is drawn towards the fleet's, gamma shape {found.shape:.3g}"
    return sheet("worst_nodes", "Rate of a node, shrunk", rows=rows, shown=shown, note=note)
