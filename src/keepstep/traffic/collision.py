"""How much of a job's collective time is lost because its flows meet on shared links, and what that costs.

The model gives the transfer time on the ways the flows take and on collision-free ones; their ratio, applied to the
time that was measured, is the collision's part. It is never more than what the measured time exceeds the ideal by, nor
more than the waiting that was recorded. Where the ideal exceeds the measured time the model does not fit. Where the
ways are not known, hashing with many seeds gives a range.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from keepstep.traffic.model import Modelled
from keepstep.traffic.observed import Observed

__all__ = ["CollisionCost", "collision_cost"]

_ROUNDING = 1 + 1e-9


class CollisionCost(msgspec.Struct, frozen=True):
    """Seconds per step (of one rank) and what they cost; a triple is (lowest, median, highest) over possible ways.

    `share` is collision_s over the recorded wait (0 where nothing waited). `measured_s`, `wait_s` are measured, all
    others follow from the model. Without `fits` the ideal is more than was measured: nothing is priced then, and 0
    says nothing.
    """

    job: str
    measured_s: float
    wait_s: float
    ideal_s: float
    collision_s: tuple[float, float, float]
    share: tuple[float, float, float]
    gpu_hours: tuple[float, float, float]
    steps: int
    gpus: int
    fits: bool = True


def collision_cost(observed: Observed, ideal: Modelled, *, actual: Sequence[Modelled], steps: int) -> CollisionCost:
    """The price of collisions over `steps` steps. `actual` is one model where the ways are known, else one a seed."""
    job = observed.demand.job
    shared = {one.use for one in ideal.collectives if one.job == job}
    uses = [use for use in observed.measured if use.use in shared]
    measured = sum(use.total_s for use in uses)
    wait = sum(use.wait_s for use in uses)
    best = ideal.seconds(job)
    lost = []
    for one in actual:
        taken = one.seconds(job)
        part = measured * (1 - best / taken) if taken > best else 0.0
        lost.append(max(0.0, min(part, measured - best, wait)))
    low, middle, high = min(lost), statistics.median(lost), max(lost)
    gpus = len(observed.demand.seats)
    hours = gpus * steps / 3600
    share = (low / wait, middle / wait, high / wait) if wait > 0 else (0.0, 0.0, 0.0)
    return CollisionCost(
        job,
        measured,
        wait,
        best,
        (low, middle, high),
        share,
        (low * hours, middle * hours, high * hours),
        steps,
        gpus,
        best <= measured * _ROUNDING,
    )
