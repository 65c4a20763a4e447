"""Flows over any network: missing links, unequal capacities, three tiers, unequal weights.

Load of a link = sum of the weights on it / its capacity in units of the part's largest cable. The whole plan comes from
the min-max linear program over paths (HiGHS), rounded to whole flows; later changes choose the path that ends lowest,
then move flows off the fullest link while that helps. `bound` is the program's value: no plan is below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from keepstep.traffic.network import Network
from keepstep.traffic.relaxation import Commodity, cut_bound, relax, whole_bound

__all__ = ["Balance"]

_Leaves = tuple[str, str]
_CLOSE = 1e-9
_STEEP = 6
"""Of several ways the one with the smallest sum of (link load)**6 is taken: nearly the smallest maximum, and even."""


class Balance:
    """Flows (numbers of the caller's) with their weights and paths. `moved` as in `Uplinks`, with the old path."""

    def __init__(self, network: Network, *, reference_gbps: float) -> None:
        self.network = network
        self.moved: dict[int, tuple[str, ...]] = {}
        self.path_of: dict[int, tuple[str, ...]] = {}
        self._reference = reference_gbps
        self._flows: dict[int, tuple[_Leaves, float]] = {}
        self._link: dict[tuple[str, str], int] = {}
        self._capacity = np.zeros(0)
        self._load = np.zeros(0)
        self._on: list[dict[int, None]] = []
        self._ways: dict[_Leaves, tuple[tuple[tuple[str, ...], ...], npt.NDArray[np.int64]]] = {}

    @property
    def max_load(self) -> float:
        """Of the fullest link, in flows of weight 1 on the largest cable."""
        return float((np.where(self._load > _CLOSE, self._load, 0.0) / self._capacity).max(initial=0.0))

    @property
    def bound(self) -> float:
        """What no plan can go below: the linear program, rounded up where loads can only be whole."""
        commodities = self._commodities()
        lowest = relax(commodities, self._capacity)
        value = lowest.value if lowest is not None else cut_bound(commodities, self._capacity)
        weights = {round(weight, 9) for _, weight in self._flows.values()}
        if len(weights) == 1:
            unit = weights.pop()
            value = max(value, whole_bound(commodities, self._capacity, unit=unit))
            if np.allclose(self._capacity[self._capacity > _CLOSE], 1.0):
                value = float(np.ceil(value / unit - 1e-6)) * unit
        return max(value, self._heaviest())

    def reachable(self, source: str, destination: str) -> bool:
        """Whether a way joins the two leaves."""
        return bool(self._candidates((source, destination))[0])

    def fill(self, flows: Mapping[int, tuple[str, str, float]]) -> None:
        """Place many (source leaf, destination leaf, weight) at once, by the linear program if it is not too large."""
        for flow, (source, destination, weight) in flows.items():
            self._flows[flow] = ((source, destination), weight)
        commodities = self._commodities()
        lowest = relax(commodities, self._capacity)
        share = dict(zip((c.leaves for c in commodities), lowest.shares, strict=True)) if lowest else {}
        for flow in sorted(flows, key=lambda number: -flows[number][2]):
            leaves, weight = self._flows[flow]
            wanted = share.get(leaves)
            self._put(
                flow, self._best(leaves, weight) if wanted is None else self._most_wanted(leaves, wanted, weight=weight)
            )
        self.improve(moves=4 * len(flows))

    def add(self, flow: int, *, source: str, destination: str, weight: float) -> None:
        """Place one flow where the fullest link of its path ends lowest. Some way must join the leaves."""
        self._flows[flow] = ((source, destination), weight)
        self._put(flow, self._best((source, destination), weight))

    def keep(self, flow: int, path: tuple[str, ...], *, weight: float) -> None:
        """Take `flow` over on the `path` it already has."""
        leaves = (path[0], path[-1])
        self._flows[flow] = (leaves, weight)
        self._put(flow, self._candidates(leaves)[0].index(path))

    def remove(self, flows: Iterable[int]) -> None:
        """Forget `flows`."""
        for flow in flows:
            self._take(flow)
            del self._flows[flow], self.path_of[flow]

    def reroute(self) -> list[int]:
        """After the network's `down` changed: flows on dead links move. Returns those that no way is left for."""
        self._ways.clear()
        for (start, end), number in self._link.items():
            self._capacity[number] = max(self.network.capacity(start, end) / self._reference, 1e-12)
        homeless = []
        for flow, path in list(self.path_of.items()):
            if all(self.network.alive(a, b) for a, b in zip(path, path[1:], strict=False)):
                continue
            leaves, weight = self._flows[flow]
            self._take(flow)
            if self.reachable(*leaves):
                self._put(flow, self._best(leaves, weight))
            else:
                homeless.append(flow)
                del self._flows[flow], self.path_of[flow]
        return homeless

    def improve(self, moves: int) -> int:
        """Move at most `moves` flows, each off the fullest link onto a path that stays below it; how many moved."""
        for done in range(moves):
            if not len(self._load):
                return done
            share = self._load / self._capacity
            link = int(share.argmax())
            found = self._relief(link, float(share[link]))
            if found is None:
                return done
            flow, way = found
            self._take(flow)
            self._put(flow, way)
        return moves

    def settle(self) -> dict[int, tuple[str, ...]]:
        """The flows moved since the last call and still elsewhere, with their old path; counting starts again."""
        moved = {flow: old for flow, old in self.moved.items() if self.path_of.get(flow, old) != old}
        self.moved = {}
        return moved

    def loads(self) -> dict[tuple[str, str], float]:
        """Sum of weights by link, where there is any."""
        return {link: float(self._load[number]) for link, number in self._link.items() if self._load[number] > _CLOSE}

    def _heaviest(self) -> float:
        """The heaviest flow on the widest way is a bound too: a flow is not split."""
        widest = float(self._capacity.max()) if len(self._capacity) else 1.0
        return max((weight for _, weight in self._flows.values()), default=0.0) / widest

    def _relief(self, link: int, limit: float) -> tuple[int, int] | None:
        best: tuple[float, int, int] | None = None
        for flow in self._on[link]:
            leaves, weight = self._flows[flow]
            paths, links = self._candidates(leaves)
            mine = paths.index(self.path_of[flow])
            load = np.append(self._load, 0.0)
            load[links[mine]] -= weight
            after = ((load[links] + weight) / np.append(self._capacity, np.inf)[links]).max(axis=1)
            after[mine] = np.inf
            way = int(after.argmin())
            if after[way] < limit - _CLOSE and (best is None or after[way] < best[0]):
                best = (float(after[way]), flow, way)
        return None if best is None else (best[1], best[2])

    def _candidates(self, leaves: _Leaves) -> tuple[tuple[tuple[str, ...], ...], npt.NDArray[np.int64]]:
        """The paths between two leaves and the numbers of their links (paths x hops, -1 pads)."""
        found = self._ways.get(leaves)
        if found is None:
            paths = self.network.paths(*leaves)
            links = [[self._number(a, b) for a, b in zip(path, path[1:], strict=False)] for path in paths]
            hops = len(paths[0]) - 1 if paths else 0
            found = self._ways[leaves] = (paths, np.array(links, dtype=np.int64).reshape(len(paths), hops))
        return found

    def _number(self, start: str, end: str) -> int:
        number = self._link.get((start, end))
        if number is None:
            number = self._link[start, end] = len(self._link)
            self._capacity = np.append(self._capacity, self.network.capacity(start, end) / self._reference)
            self._load = np.append(self._load, 0.0)
            self._on.append({})
        return number

    def _best(self, leaves: _Leaves, weight: float) -> int:
        _, links = self._candidates(leaves)
        share = (self._load[links] + weight) / self._capacity[links]
        return int((share**_STEEP).sum(axis=1).argmin())

    def _most_wanted(self, leaves: _Leaves, wanted: npt.NDArray[np.float64], *, weight: float) -> int:
        """The path that the linear program still wants most; among equals the one that ends lowest."""
        _, links = self._candidates(leaves)
        share = ((self._load[links] + weight) / self._capacity[links]).max(axis=1)
        way = int(np.lexsort((share, -np.round(wanted / max(weight, _CLOSE), 6)))[0])
        wanted[way] -= weight
        return way

    def _put(self, flow: int, way: int) -> None:
        leaves, weight = self._flows[flow]
        paths, links = self._candidates(leaves)
        self._load[links[way]] += weight
        for link in links[way]:
            self._on[link][flow] = None
        self.path_of[flow] = paths[way]

    def _take(self, flow: int) -> None:
        path = self.path_of[flow]
        self.moved.setdefault(flow, path)
        weight = self._flows[flow][1]
        for start, end in zip(path, path[1:], strict=False):
            number = self._link[start, end]
            self._load[number] -= weight
            del self._on[number][flow]

    def _commodities(self) -> Sequence[Commodity]:
        totals: dict[_Leaves, float] = {}
        for leaves, weight in self._flows.values():
            totals[leaves] = totals.get(leaves, 0.0) + weight
        return [Commodity(leaves, total, self._candidates(leaves)[1]) for leaves, total in totals.items()]
