"""What a health check changed: failures before and after on nodes that got it, against nodes that did not. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from scipy import special

from keepstep.fleet.rates_change import CANNOT_TELL

__all__ = ["Alarms", "Effect", "PeriodCounts", "alarms", "effect_of"]


class PeriodCounts(msgspec.Struct, frozen=True):
    """Events and exposure (node-days) of one group of nodes in one period, and the variance-to-mean ratio per node."""

    events: int
    node_days: float
    vmr: float = 1.0


class Effect(msgspec.Struct, frozen=True):
    """Rates per 1000 node-days of both groups before and after; `ratio` is how much more the rate of the nodes with
    the check changed than that of the others, with its 95 % interval; `verdict` says what that allows to say."""

    check: str
    introduced: str
    treated_before: float
    treated_after: float
    compared_before: float
    compared_after: float
    ratio: float
    low: float
    high: float
    verdict: str


def effect_of(
    check: str,
    introduced: str,
    *,
    treated: tuple[PeriodCounts, PeriodCounts],
    compared: tuple[PeriodCounts, PeriodCounts] | None,
    confidence: float = 0.95,
) -> Effect:
    """Difference in differences of log rates; its variance is the sum of vmr/events over the four cells.

    Half an event is added to every cell (Haldane 1956), so that empty cells widen the interval instead of ending the
    comparison. Without a comparison group, or with fewer than 5 events before, the verdict is "cannot tell".
    """
    cells = [*treated, *(compared or (PeriodCounts(0, 0.0), PeriodCounts(0, 0.0)))]
    rates = [1000.0 * cell.events / cell.node_days if cell.node_days else float("nan") for cell in cells]
    ratio, low, high = _ratio_of_ratios(cells, confidence=confidence)
    if compared is None:
        verdict = f"{CANNOT_TELL}: there is no group without the check"
    elif min(cells[0].events, cells[2].events) < 5:
        verdict = f"{CANNOT_TELL}: fewer than 5 events before in one of the groups"
    elif low <= 1.0 <= high:
        verdict = CANNOT_TELL
    else:
        verdict = "fewer failures are seen with it" if ratio < 1 else "more failures are seen with it"
    return Effect(
        check,
        introduced,
        treated_before=rates[0],
        treated_after=rates[1],
        compared_before=rates[2],
        compared_after=rates[3],
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict,
    )


def _ratio_of_ratios(cells: list[PeriodCounts], *, confidence: float) -> tuple[float, float, float]:
    if any(cell.node_days <= 0 for cell in cells):
        return float("nan"), 0.0, float("inf")
    logs = [np.log((cell.events + 0.5) / cell.node_days) for cell in cells]
    log_ratio = (logs[1] - logs[0]) - (logs[3] - logs[2])
    error = np.sqrt(sum(max(cell.vmr, 1.0) / (cell.events + 0.5) for cell in cells))
    spread = special.ndtri(0.5 + confidence / 2) * error
    return float(np.exp(log_ratio)), float(np.exp(log_ratio - spread)), float(np.exp(log_ratio + spread))


class Alarms(msgspec.Struct, frozen=True):
    """Alarms of one check: how many, how many the node confirmed within the window, what the others cost.

    `good_jobs_hit` is the share of completed jobs that saw a failed check (target of Meta, HPCA 2025: under 1 %).
    """

    check: str
    fired: int
    confirmed: int
    false_alarms: int
    false_share: float
    idle_node_hours: float
    good_jobs_hit: float


def alarms(
    check: str,
    fired: tuple[Any, Any],
    *,
    confirmed_at: tuple[Any, Any],
    out_hours: Any,
    good_jobs_hit: float,
    window: float,
) -> Alarms:
    """`fired` and `confirmed_at` are (node, time) arrays; a confirmation counts up to `window` after the alarm (and at
    most `window` before it, for times are rough). `out_hours` is how long each alarm took its node out."""
    node, time = np.asarray(fired[0]), np.asarray(fired[1])
    order = np.lexsort((confirmed_at[1], confirmed_at[0]))
    known_node, known_time = np.asarray(confirmed_at[0])[order], np.asarray(confirmed_at[1])[order]
    good = np.zeros(len(node), bool)
    for number in np.unique(node):
        mine = known_time[known_node == number]
        here = node == number
        nearest = np.searchsorted(mine, time[here] - window, side="left")
        found = nearest < len(mine)
        good[here] = found & (np.append(mine, 0)[np.where(found, nearest, 0)] <= time[here] + window)
    false = int((~good).sum())
    return Alarms(
        check=check,
        fired=len(node),
        confirmed=int(good.sum()),
        false_alarms=false,
        false_share=false / len(node) if len(node) else float("nan"),
        idle_node_hours=float(np.asarray(out_hours)[~good].sum()),
        good_jobs_hit=good_jobs_hit,
    )
