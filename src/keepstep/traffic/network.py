"""A topology made ready to ask: who is plugged in where, which ways lead from leaf to leaf, what is down."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from keepstep.errors import TrafficError
from keepstep.records.topology import Cable, Port, Topology, link_name, split_link

__all__ = ["MAX_PATHS", "Network", "Way"]

MAX_PATHS = 4096
"""Ways between two leaves that are looked at; of more than these so many are taken that are spread evenly over all."""

Way = tuple[tuple[str, ...], int]
"""(switches from leaf to leaf, which of the parallel cables)."""

_GOLDEN = 0.6180339887498949


class Network:
    """A checked topology (see `keepstep.traffic.checking`), and the links of it that are `down` now."""

    def __init__(self, topology: Topology, down: Iterable[str] = ()) -> None:
        """Raises TrafficError if `down` names a link or switch that is not there."""
        self.topology = topology
        self.ports: dict[str, Port] = {port.name: port for port in topology.ports}
        self.tier: dict[str, int] = {switch.name: switch.tier for switch in topology.switches}
        self.of_host: dict[str, list[Port]] = {}
        for port in topology.ports:
            self.of_host.setdefault(port.host, []).append(port)
        self.uppers: dict[str, dict[str, Cable]] = {name: {} for name in self.tier}
        self.lowers: dict[str, dict[str, Cable]] = {name: {} for name in self.tier}
        for cable in topology.cables:
            self.uppers[cable.lower][cable.upper] = cable
            self.lowers[cable.upper][cable.lower] = cable
        self.down: frozenset[str] = frozenset()
        self.dead: frozenset[str] = frozenset()
        self.rates: dict[str, float] = {}
        self.set_down(down)

    def set_down(self, names: Iterable[str]) -> None:
        """From now on exactly `names` (links `a>b`, or switches) are down. Raises TrafficError for an unknown one."""
        names = frozenset(names)
        for name in sorted(names):
            self.links_of(name)
        self.down = names
        self._known: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {}
        self.dead = frozenset(link for name in names for link in self.links_of(name))

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """From now on exactly these links `a>b` give less than their capacity: this share of it, above 0 and below 1.
        Raises TrafficError for an unknown link or another share."""
        for name, share in rates.items():
            if self.links_of(name) != (name,) or not 0 < share < 1:
                raise TrafficError(f"link {name!r} at {share!r} of its rate", remedy="name a link and a share below 1")
        self.rates = dict(rates)

    def links_of(self, name: str) -> tuple[str, ...]:
        """The directed links that `name` stands for: itself, or all of a switch. Raises TrafficError if unknown."""
        start, end = split_link(name)
        if name != start:
            if self.cable(start, end) is None:
                raise TrafficError(f"no link {name!r} in topology {self.topology.name!r}", remedy="see `traffic show`")
            return (name,)
        if start not in self.tier:
            raise TrafficError(f"no switch {name!r} in topology {self.topology.name!r}", remedy="see `traffic show`")
        others = [*self.uppers[start], *self.lowers[start]]
        return tuple(link for other in others for link in (link_name(start, other), link_name(other, start)))

    def cable(self, start: str, end: str) -> Cable | None:
        """What joins two switches, whichever is the upper one."""
        return self.uppers.get(start, {}).get(end) or self.lowers.get(start, {}).get(end)

    def alive(self, start: str, end: str) -> bool:
        """Whether the directed link is there and not down."""
        return link_name(start, end) not in self.dead and self.cable(start, end) is not None

    def capacity(self, start: str, end: str) -> float:
        """Gbit/s of all parallel cables of a directed link, as far as it gives them; 0.0 where it is down."""
        cable = self.cable(start, end)
        if cable is None or not self.alive(start, end):
            return 0.0
        return cable.gbps * cable.count * self.rates.get(link_name(start, end), 1.0)

    def paths(self, source: str, destination: str) -> tuple[tuple[str, ...], ...]:
        """All shortest ways up and down from leaf to leaf that are alive; ((leaf,),) for the same leaf."""
        if source == destination:
            return ((source,),)
        climbs: list[tuple[str, ...]] = [(source,)]
        falls: list[tuple[str, ...]] = [(destination,)]
        while climbs and falls:
            climbs = [(*way, upper) for way in climbs for upper in self._above(way[-1], rising=True)]
            falls = [(upper, *way) for way in falls for upper in self._above(way[0], rising=False)]
            tops: dict[str, list[tuple[str, ...]]] = {}
            for way in sorted(falls):
                tops.setdefault(way[0], []).append(way[1:])
            met = [climb for climb in sorted(climbs) if climb[-1] in tops]
            if met:
                ends = list(itertools.accumulate(len(tops[climb[-1]]) for climb in met))
                return tuple(self._joined(met, tops, ends=ends))
        return ()

    @staticmethod
    def _joined(
        climbs: Sequence[tuple[str, ...]], tops: Mapping[str, Sequence[tuple[str, ...]]], *, ends: Sequence[int]
    ) -> Iterator[tuple[str, ...]]:
        """The ways up and down joined, in order; `ends` counts those of each climb and all before it."""
        total = ends[-1]
        numbers: Iterable[int] = range(total)
        if total > MAX_PATHS:
            stride = next(step for step in itertools.count(int(total * _GOLDEN)) if math.gcd(step, total) == 1)
            numbers = sorted(turn * stride % total for turn in range(MAX_PATHS))
        for number in numbers:
            place = bisect.bisect_right(ends, number)
            climb = climbs[place]
            yield (*climb, *tops[climb[-1]][number - ends[place]])

    def paths_between(self, source: str, destination: str) -> tuple[tuple[str, ...], ...]:
        """`paths`, remembered until `down` changes."""
        key = (source, destination)
        if key not in self._known:
            self._known[key] = self.paths(source, destination)
        return self._known[key]

    def _above(self, switch: str, *, rising: bool) -> Iterator[str]:
        for upper in self.uppers[switch]:
            if self.alive(switch, upper) if rising else self.alive(upper, switch):
                yield upper

    @functools.cached_property
    def parts(self) -> list[list[str]]:
        """The leaves of each connected part, by cables that are there, dead or not; in order of appearance."""
        seen: set[str] = set()
        found: list[list[str]] = []
        for name, tier in self.tier.items():
            if tier != 1 or name in seen:
                continue
            found.append([])
            heap = [name]
            seen.add(name)
            while heap:
                switch = heap.pop()
                if self.tier[switch] == 1:
                    found[-1].append(switch)
                fresh = [other for other in (*self.uppers[switch], *self.lowers[switch]) if other not in seen]
                seen.update(fresh)
                heap += fresh
        return [sorted(part) for part in found]
