"""One connected part of a network with its flows: the exact engine where it applies, the general one elsewhere.

`Uplinks` (edge colouring, provably the smallest maximum) serves two tiers with equal cables when flows are counted;
`Balance` (linear program with rounding) serves three tiers, unequal cables, and flows weighed by their bytes. Where
links of a part give less than their capacity for a while, the general engine takes the plan over, and gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from keepstep.records.topology import split_link
from keepstep.traffic.balance import Balance
from keepstep.traffic.network import Network, Way
from keepstep.traffic.uplinks import Uplinks

__all__ = ["Part", "Way"]


class Part:
    """Slots (numbers of the planner's) between the `leaves` of one part, and the way of each."""

    def __init__(self, network: Network, leaves: Sequence[str], *, by_bytes: bool) -> None:
        self._network = network
        self._leaves = {leaf: number for number, leaf in enumerate(leaves)}
        self._spines = sorted({upper for leaf in leaves for upper in network.uppers[leaf]})
        cables = [cable for leaf in leaves for cable in network.uppers[leaf].values()]
        tall = any(network.uppers[spine] for spine in self._spines)
        kinds = {(cable.gbps, cable.count) for cable in cables}
        self._even = len(kinds) == 1 and not tall and not by_bytes
        self._cables = cables
        self._cables_each = cables[0].count if self._even else 1
        self._number = {spine: number for number, spine in enumerate(self._spines)}
        self._names = list(self._leaves)
        self._engine: Uplinks | Balance = self._uplinks() if self._even else self._balance()
        self._closed: frozenset[tuple[int, int]] = frozenset()
        self._absent = self._missing() if self._even else frozenset()
        self._moved: dict[int, None] = {}
        self.follow_network()

    @property
    def exact(self) -> bool:
        """Whether the plan is the optimum by construction."""
        return isinstance(self._engine, Uplinks)

    @property
    def method(self) -> str:
        """How the plan of this part is made."""
        return "edge colouring" if self.exact else "linear program"

    @property
    def max_load(self) -> float:
        """Of the fullest cable, see the engines."""
        return float(self._engine.max_load)

    @property
    def bound(self) -> float:
        """What no plan can go below."""
        return float(self._engine.bound)

    def reachable(self, source: str, destination: str) -> bool:
        """Whether a way joins two leaves of this part now."""
        if isinstance(self._engine, Uplinks):
            return self._engine.reachable(self._leaves[source], self._leaves[destination])
        return self._engine.reachable(source, destination)

    def add(self, slots: Mapping[int, tuple[str, str, float]]) -> None:
        """Give each slot (source leaf, destination leaf, weight) a way; all must be reachable."""
        if isinstance(self._engine, Uplinks):
            for slot, (source, destination, _) in slots.items():
                self._engine.add(slot, source=self._leaves[source], destination=self._leaves[destination])
            if self._closed and self._engine.max_load > self._engine.bound:
                self._engine.level()
        elif not self._engine.way_of:
            self._engine.fill(slots)
        else:
            for slot, (source, destination, weight) in slots.items():
                self._engine.add(slot, source=source, destination=destination, weight=weight)
            self._engine.improve(len(slots))

    def keep(self, slot: int, way: Way, *, weight: float) -> None:
        """Take a slot over with the way it has in a plan in force."""
        (source, spine, *_), cable = way
        if isinstance(self._engine, Uplinks):
            ends = {"source": self._leaves[source], "destination": self._leaves[way[0][-1]]}
            self._engine.keep(slot, **ends, spine=self._number[spine] * self._cables_each + cable)
        else:
            self._engine.keep(slot, way, weight=weight)

    def remove(self, slots: Iterable[int]) -> None:
        """Forget slots."""
        self._engine.remove(slots)

    def way(self, slot: int) -> Way:
        """The way of a slot. Raises KeyError where it has none."""
        if isinstance(self._engine, Balance):
            return self._engine.way_of[slot]
        left, right = self._engine.ends_of(slot)
        spine, cable = divmod(self._engine.spine_of[slot], self._cables_each)
        return (self._names[left], self._spines[spine], self._names[right]), cable

    def follow_network(self) -> list[int]:
        """Move slots off links that went down or slowed down since, and use those that came back; the slots that have
        no way now."""
        homeless = self._follow_down()
        if (self._even and not self._slowed()) != self.exact:
            self._change_engine()
        return homeless

    def _follow_down(self) -> list[int]:
        if isinstance(self._engine, Balance):
            homeless = self._engine.reroute()
            slowed = len(self._engine.way_of) if self._slowed() else 0
            self._engine.improve(max(8, len(self._engine.moved), slowed))
            return homeless
        closed = self._absent | frozenset(self._dead_links())
        opened = self._closed - closed
        fresh, self._closed = closed - self._closed, closed
        if opened:
            self._engine.permit(sorted(opened))
        homeless = self._engine.forbid(sorted(fresh))
        if fresh and self._engine.max_load > self._engine.bound:
            self._engine.level()
        return homeless

    def _slowed(self) -> bool:
        """Whether a link of this part gives less than its capacity."""
        return any(
            end in self._leaves or end in self._number for link in self._network.rates for end in link.split(">")
        )

    def _change_engine(self) -> None:
        """Hand the plan over to the other engine as it is, which then betters it."""
        old = self._engine
        ways = {slot: self.way(slot) for slot in (old.way_of if isinstance(old, Balance) else old.spine_of)}
        self._moved |= dict.fromkeys(old.settle())
        self._engine = self._balance() if isinstance(old, Uplinks) else self._uplinks()
        self._closed = frozenset()
        for slot, way in ways.items():
            self.keep(slot, way, weight=1.0)
        self._engine.settle()
        if isinstance(self._engine, Balance):
            self._engine.improve(len(ways))
        else:
            self._follow_down()
            self._engine.level()

    def settle(self) -> list[int]:
        """The slots that have another way than at the last call."""
        moved, self._moved = self._moved | dict.fromkeys(self._engine.settle()), {}
        return list(moved)

    def _uplinks(self) -> Uplinks:
        return Uplinks(len(self._leaves), len(self._spines) * self._cables_each)

    def _balance(self) -> Balance:
        return Balance(self._network, reference_gbps=max((cable.gbps for cable in self._cables), default=1.0))

    def _missing(self) -> frozenset[tuple[int, int]]:
        """(end, spine) of the engine for every cable that is not there."""
        return frozenset(
            (end, column * self._cables_each + cable)
            for leaf, number in self._leaves.items()
            for spine, column in self._number.items()
            if spine not in self._network.uppers[leaf]
            for end in (number, len(self._leaves) + number)
            for cable in range(self._cables_each)
        )

    def _dead_links(self) -> Iterable[tuple[int, int]]:
        """(end, spine) of the engine for every link that is down."""
        for link in self._network.dead:
            start, end = split_link(link)
            rising = start in self._leaves and end in self._number
            if rising or (end in self._leaves and start in self._number):
                number = self._leaves[start] if rising else len(self._leaves) + self._leaves[end]
                column = self._number[end if rising else start]
                yield from ((number, column * self._cables_each + cable) for cable in range(self._cables_each))
