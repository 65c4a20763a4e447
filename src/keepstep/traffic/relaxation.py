"""The min-max linear program: how low the fullest link can be if flows may be split over paths at will."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

__all__ = ["MAX_VARIABLES", "Commodity", "Relaxed", "cut_bound", "relax", "whole_bound"]

_CLOSED = 1e-9
MAX_VARIABLES = 20_000
"""Larger programs take more than a second or two; then `cut_bound` stands in for the bound. HiGHS's interior-point
method is ten times as fast on these as its simplex (6,000 variables: 0.35 against 3.9 s)."""


@dataclass(frozen=True)
class Commodity:
    """All flows between two leaves: their total weight, and the links of each path (paths x hops)."""

    leaves: tuple[str, str]
    weight: float
    links: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Relaxed:
    """The smallest possible load of the fullest link, and for each commodity the weight on each of its paths."""

    value: float
    shares: list[npt.NDArray[np.float64]]


def relax(commodities: Sequence[Commodity], capacity: npt.NDArray[np.float64]) -> Relaxed | None:
    """min t so that every commodity is shared out over its paths and load <= t * capacity on every link.

    None where the program is larger than MAX_VARIABLES or HiGHS finds no solution.
    """
    counts = [len(commodity.links) for commodity in commodities]
    total = sum(counts)
    if total > MAX_VARIABLES or any(count == 0 for count in counts):
        return None
    if total == 0:
        return Relaxed(0.0, [])
    owner = np.repeat(np.arange(len(commodities)), counts)
    links = np.concatenate([commodity.links.ravel() for commodity in commodities])
    hops = np.concatenate([np.full(len(c.links), c.links.shape[1]) for c in commodities])
    load = sparse.coo_array((np.ones(len(links)), (links, np.repeat(np.arange(total), hops))), (len(capacity), total))
    upper = sparse.hstack([load, sparse.coo_array(-capacity.reshape(-1, 1))], format="csr")
    equal = sparse.coo_array((np.ones(total), (owner, np.arange(total))), (len(commodities), total + 1))
    cost = np.zeros(total + 1)
    cost[-1] = 1.0
    answer = optimize.linprog(
        cost,
        A_ub=upper,
        b_ub=np.zeros(len(capacity)),
        A_eq=equal.tocsr(),
        b_eq=np.array([commodity.weight for commodity in commodities]),
        method="highs-ipm",
    )
    if answer.status != 0:
        return None
    shares = np.split(np.asarray(answer.x[:-1]), np.cumsum(counts)[:-1])
    return Relaxed(float(answer.x[-1]), list(shares))


def cut_bound(commodities: Sequence[Commodity], capacity: npt.NDArray[np.float64]) -> float:
    """What leaves a leaf or pod, or reaches one, over the capacity of all links it can take: a bound for every plan."""
    best = 0.0
    for weight, links in _cuts(commodities):
        room = float(capacity[sorted(links)].sum())
        best = max(best, weight / room if room > 0 else 0.0)
    return best


def whole_bound(commodities: Sequence[Commodity], capacity: npt.NDArray[np.float64], *, unit: float) -> float:
    """As `cut_bound`, where every flow weighs `unit` and is not split: what the links can carry in whole flows."""
    best = 0.0
    for weight, links in _cuts(commodities):
        room = capacity[sorted(links)]
        best = max(best, _least_load(round(weight / unit), room[room > _CLOSED], unit=unit))
    return best


def _cuts(commodities: Sequence[Commodity]) -> Iterator[tuple[float, set[int]]]:
    """(weight, links it must pass) of each leaf on the way up and down, and of each pod where there are three tiers.

    All ways out of a pod pass its links to the cores, so the lowest number among these stands for the pod.
    """
    sums: dict[tuple[int, str | int], tuple[float, set[int]]] = {}
    for commodity in commodities:
        keys: list[tuple[int, str | int]] = [(0, commodity.leaves[0]), (-1, commodity.leaves[1])]
        if commodity.links.shape[1] > 2:
            keys += [(hop, int(commodity.links[:, hop].min())) for hop in (1, -2)]
        for key in keys:
            weight, links = sums.get(key, (0.0, set()))
            links.update(commodity.links[:, key[0]].tolist())
            sums[key] = (weight + commodity.weight, links)
    yield from sums.values()


def _least_load(count: int, room: npt.NDArray[np.float64], *, unit: float) -> float:
    """The smallest load of the fullest of links with `room` that carry `count` whole flows: fill the emptiest first."""
    if not len(room) or count < 1:
        return 0.0
    level = count * unit / float(room.sum())
    while np.floor(level * room / unit + 1e-9).sum() < count:
        level = float(((np.floor(level * room / unit + 1e-9) + 1) * unit / room).min())
    return level
