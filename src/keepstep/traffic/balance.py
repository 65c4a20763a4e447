"""Flows over any network: missing links, unequal capacities, three tiers, unequal weights.

Load of a cable = sum of the weights on it / its capacity in units of the part's largest cable. The whole plan comes
from the min-max linear program over ways (HiGHS), rounded to whole flows; later changes choose the way that ends
lowest, then move flows off the fullest cable while that helps. `bound` is the program's value: no plan is below it.
Parallel cables are ways of their own; a way takes cables of one number, as far as every hop has as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepstep.traffic.network import MAX_PATHS, Network, Way
from keepstep.traffic.relaxation import Commodity, cut_bound, relax, whole_bound

__all__ = ["Balance"]

_Leaves = tuple[str, str]
_Hop = tuple[str, str, int]
"""One cable in one direction: its ends, and its number among the parallel ones."""
_CLOSE = 1e-9
_STEEP = 6
"""Of several ways the one with the smallest sum of (link load)**6 is taken: nearly the smallest maximum, and even."""


class _Choice(NamedTuple):
    """The ways between two leaves, the numbers of the links of each (ways x hops), which way is which, and whether
    there are no others."""

    ways: tuple[Way, ...]
    links: npt.NDArray[np.int64]
    number: dict[Way, int]
    whole: bool


class Balance:
    """Flows (numbers of the caller's) with their weights and ways. `moved` as in `Uplinks`, with the old way."""

    def __init__(self, network: Network, *, reference_gbps: float) -> None:
        self.network = network
        self.moved: dict[int, Way] = {}
        self.way_of: dict[int, Way] = {}
        self._reference = reference_gbps
        self._flows: dict[int, tuple[_Leaves, float]] = {}
        self._link: dict[_Hop, int] = {}
        self._capacity = np.zeros(0)
        self._load = np.zeros(0)
        self._on: list[dict[int, None]] = []
        self._choices: dict[_Leaves, _Choice] = {}

    @property
    def max_load(self) -> float:
        """Of the fullest cable, in flows of weight 1 on the largest cable."""
        return float((np.where(self._load > _CLOSE, self._load, 0.0) / self._capacity).max(initial=0.0))

    @property
    def bound(self) -> float:
        """What no plan can go below: the linear program, rounded up where loads can only be whole."""
        commodities = self._commodities()
        whole = all(self._candidates(commodity.leaves).whole for commodity in commodities)
        lowest = relax(commodities, self._capacity) if whole else None
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
        return bool(self._candidates((source, destination)).ways)

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
        """Place one flow where the fullest cable of its way ends lowest. Some way must join the leaves."""
        self._flows[flow] = ((source, destination), weight)
        self._put(flow, self._best((source, destination), weight))

    def keep(self, flow: int, way: Way, *, weight: float) -> None:
        """Take `flow` over on the `way` it already has, or on another one where that is none of the shortest now."""
        leaves = (way[0][0], way[0][-1])
        self._flows[flow] = (leaves, weight)
        number = self._number_of(leaves, way)
        self._put(flow, self._best(leaves, weight) if number is None else number)

    def remove(self, flows: Iterable[int]) -> None:
        """Forget `flows`."""
        for flow in flows:
            self._take(flow)
            del self._flows[flow], self.way_of[flow]

    def reroute(self) -> list[int]:
        """After the network's `down` changed: flows on dead links move, and those on a way round what is back. Returns
        those that no way is left for."""
        self._choices.clear()
        for hop, number in self._link.items():
            self._capacity[number] = max(self._room(hop), 1e-12)
        homeless = []
        for flow, way in list(self.way_of.items()):
            leaves, weight = self._flows[flow]
            if self._number_of(leaves, way) is not None:
                continue
            self._take(flow)
            if self.reachable(*leaves):
                self._put(flow, self._best(leaves, weight))
            else:
                homeless.append(flow)
                del self._flows[flow], self.way_of[flow]
        return homeless

    def improve(self, moves: int) -> int:
        """Move at most `moves` flows, each off the fullest cable onto a way that stays below it; how many moved."""
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

    def settle(self) -> dict[int, Way]:
        """The flows moved since the last call and still elsewhere, with their old way; counting starts again."""
        moved = {flow: old for flow, old in self.moved.items() if self.way_of.get(flow, old) != old}
        self.moved = {}
        return moved

    def loads(self) -> dict[tuple[str, str, int], float]:
        """Sum of weights by cable and direction, where there is any."""
        return {hop: float(self._load[number]) for hop, number in self._link.items() if self._load[number] > _CLOSE}

    def _heaviest(self) -> float:
        """The heaviest flow on the widest way is a bound too: a flow is not split."""
        widest = float(self._capacity.max()) if len(self._capacity) else 1.0
        return max((weight for _, weight in self._flows.values()), default=0.0) / widest

    def _relief(self, link: int, limit: float) -> tuple[int, int] | None:
        best: tuple[float, int, int] | None = None
        for flow in self._on[link]:
            leaves, weight = self._flows[flow]
            links, number = self._candidates(leaves)[1:3]
            mine = number[self.way_of[flow]]
            load = np.append(self._load, 0.0)
            load[links[mine]] -= weight
            after = ((load[links] + weight) / np.append(self._capacity, np.inf)[links]).max(axis=1)
            after[mine] = np.inf
            way = int(after.argmin())
            if after[way] < limit - _CLOSE and (best is None or after[way] < best[0]):
                best = (float(after[way]), flow, way)
        return None if best is None else (best[1], best[2])

    def _candidates(self, leaves: _Leaves) -> _Choice:
        found = self._choices.get(leaves)
        if found is None:
            paths = self.network.paths(*leaves)
            abreast = {path: self._abreast(path) for path in paths}
            most = MAX_PATHS // max(1, len(paths))
            ways = tuple((path, cable) for path in paths for cable in range(min(abreast[path], most)))
            links = [[self._number(hop) for hop in self._hops(way)] for way in ways]
            hops = len(paths[0]) - 1 if paths else 0
            array = np.array(links, dtype=np.int64).reshape(len(ways), hops)
            number = {way: place for place, way in enumerate(ways)}
            whole = len(paths) < MAX_PATHS and max(abreast.values(), default=1) <= most
            found = self._choices[leaves] = _Choice(ways, array, number, whole)
        return found

    def _number_of(self, leaves: _Leaves, way: Way) -> int | None:
        """The number of a way among those between its leaves; None where it is none of the shortest now. One that is
        and was left out is looked at from now on."""
        choice = self._candidates(leaves)
        if way in choice.number or choice.whole:
            return choice.number.get(way)
        hops = self._hops(way)
        if len(hops) != choice.links.shape[1] or not all(self.network.alive(a, b) for a, b, _ in hops):
            return None
        links = np.vstack([choice.links, [self._number(hop) for hop in hops]])
        number = choice.number | {way: len(choice.ways)}
        self._choices[leaves] = _Choice((*choice.ways, way), links, number, whole=False)
        return len(choice.ways)

    def _abreast(self, path: tuple[str, ...]) -> int:
        """How many parallel cables the widest hop has."""
        cables = (self.network.cable(a, b) for a, b in zip(path, path[1:], strict=False))
        return max((cable.count for cable in cables if cable is not None), default=1)

    def _hops(self, way: Way) -> list[_Hop]:
        path, number = way
        pairs = zip(path, path[1:], strict=False)
        return [(a, b, number % (cable.count if (cable := self.network.cable(a, b)) else 1)) for a, b in pairs]

    def _room(self, hop: _Hop) -> float:
        """The capacity of one cable, in units of the largest."""
        cable = self.network.cable(*hop[:2])
        return self.network.capacity(*hop[:2]) / (cable.count if cable else 1) / self._reference

    def _number(self, hop: _Hop) -> int:
        number = self._link.get(hop)
        if number is None:
            number = self._link[hop] = len(self._link)
            self._capacity = np.append(self._capacity, self._room(hop))
            self._load = np.append(self._load, 0.0)
            self._on.append({})
        return number

    def _best(self, leaves: _Leaves, weight: float) -> int:
        links = self._candidates(leaves).links
        share = (self._load[links] + weight) / self._capacity[links]
        return int((share**_STEEP).sum(axis=1).argmin())

    def _most_wanted(self, leaves: _Leaves, wanted: npt.NDArray[np.float64], *, weight: float) -> int:
        """The way that the linear program still wants most; among equals the one that ends lowest."""
        links = self._candidates(leaves).links
        share = ((self._load[links] + weight) / self._capacity[links]).max(axis=1)
        way = int(np.lexsort((share, -np.round(wanted / max(weight, _CLOSE), 6)))[0])
        wanted[way] -= weight
        return way

    def _put(self, flow: int, number: int) -> None:
        leaves, weight = self._flows[flow]
        ways, links = self._candidates(leaves)[:2]
        self._load[links[number]] += weight
        for link in links[number]:
            self._on[link][flow] = None
        self.way_of[flow] = ways[number]

    def _take(self, flow: int) -> None:
        way = self.way_of[flow]
        self.moved.setdefault(flow, way)
        weight = self._flows[flow][1]
        for hop in self._hops(way):
            number = self._link[hop]
            self._load[number] -= weight
            del self._on[number][flow]

    def _commodities(self) -> Sequence[Commodity]:
        totals: dict[_Leaves, float] = {}
        for leaves, weight in self._flows.values():
            totals[leaves] = totals.get(leaves, 0.0) + weight
        return [Commodity(leaves, total, self._candidates(leaves).links) for leaves, total in totals.items()]
