"""Where an hour of repair work pays most: causes ranked by what they cost. Pure.

Cost of a cause = frequency x GPUs x (detect + repair + recompute + second order).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from keepstep.fleet.rates import rate_of

__all__ = ["Costs", "Investment", "investments"]

_GPU_HOUR = 3.6e9


class Costs(msgspec.Struct, frozen=True):
    """Arrays, one entry a failed attempt: cause and owner (indices), GPUs, the parts of its cost in wall-clock [us].

    `second` is in GPU-us, because victims have GPUs of their own. `event` marks those that count as independent.
    """

    cause: Any
    owner: Any
    gpus: Any
    event: Any
    detect: Any
    repair: Any
    recompute: Any
    second: Any


class Investment(msgspec.Struct, frozen=True):
    """One cause: independent events and all failures, mean GPUs, GPU-hours by part, their share, and [low, high]:
    the total if the number of events were at the limits of its 95 % Poisson interval."""

    cause: str
    owner: str
    events: int
    failures: int
    mean_gpus: float
    detect: float
    repair: float
    recompute: float
    second_order: float
    gpu_hours: float
    low: float
    high: float
    share: float


def investments(costs: Costs, *, causes: tuple[str, ...], owners: tuple[str, ...]) -> tuple[Investment, ...]:
    """All causes that occur, the dearest first."""
    parts = [getattr(costs, name) / _GPU_HOUR * costs.gpus for name in ("detect", "repair", "recompute")]
    parts.append(costs.second / _GPU_HOUR)
    whole = float(sum(part.sum() for part in parts))
    rows = []
    for number in np.unique(costs.cause):
        here = costs.cause == number
        hours = [float(part[here].sum()) for part in parts]
        events, total = int(costs.event[here].sum()), sum(hours)
        spread = rate_of(events, max(events, 1))
        owner = np.bincount(costs.owner[here]).argmax()
        rows.append(
            Investment(
                causes[int(number)] or "unknown",
                owners[int(owner)] or "unknown",
                events,
                int(here.sum()),
                float(costs.gpus[here].mean()),
                detect=hours[0],
                repair=hours[1],
                recompute=hours[2],
                second_order=hours[3],
                gpu_hours=total,
                low=total * spread.low,
                high=total * spread.high,
                share=total / whole if whole else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.gpu_hours))
