"""The min-max linear program: how low the fullest link can be if flows may be split over paths at will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

__all__ = ["MAX_VARIABLES", "Commodity", "Relaxed", "cut_bound", "relax"]

MAX_VARIABLES = 60_000
"""Larger programs take more than some seconds; then `cut_bound` stands in for the bound."""


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
        method="highs",
    )
    if answer.status != 0:
        return None
    shares = np.split(np.asarray(answer.x[:-1]), np.cumsum(counts)[:-1])
    return Relaxed(float(answer.x[-1]), list(shares))


def cut_bound(commodities: Sequence[Commodity], capacity: npt.NDArray[np.float64]) -> float:
    """What leaves a leaf, or reaches one, over the capacity of all its first (last) links: a bound for every plan."""
    best = 0.0
    for side, hop in ((0, 0), (1, -1)):
        weight: dict[str, float] = {}
        links: dict[str, set[int]] = {}
        for commodity in commodities:
            leaf = commodity.leaves[side]
            weight[leaf] = weight.get(leaf, 0.0) + commodity.weight
            links.setdefault(leaf, set()).update(commodity.links[:, hop].tolist())
        for leaf, total in weight.items():
            room = float(capacity[sorted(links[leaf])].sum())
            best = max(best, total / room if room > 0 else 0.0)
    return best
