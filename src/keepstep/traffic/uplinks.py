"""Flows on the uplinks of a two-tier Clos, kept at the smallest possible maximum while flows come and go.

Source leaves and destination leaves are the two sides of a bipartite multigraph, flows its edges, spines its colours.
A colouring in which no leaf has more than ceil(degree / spines) edges of one colour always exists (König 1916; de Werra
1971). `add` keeps one: where no spine has room at both ends, flows along the shortest alternating path change places
(Kempe). The path passes every leaf at most once, so that one new flow moves fewer flows than there are leaf ends.

Why such a path exists, for spines a (room at the source) and b (room at the destination v): were all ends reachable
from v full, the reachable destinations would have more a-flows than the reachable sources can have, a contradiction.
Where links are missing this proof does not hold; then all spines are searched, and the limit is raised if that fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["Uplinks"]

_BUDGET = 512
"""Ends looked at for a path over all spines before the two-spine search, which always succeeds, takes over."""


class Uplinks:
    """`leaves` leaves under `spines` spines; ends 0 to leaves-1 send, ends leaves to 2*leaves-1 receive.

    Flows are numbers of the caller's. `moved` has the flows that changed their spine since `settle`, with the old one.
    """

    def __init__(self, leaves: int, spines: int) -> None:
        self.leaves = leaves
        self.spines = spines
        self.moved: dict[int, int] = {}
        self.spine_of: dict[int, int] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        self._allowed = [(1 << spines) - 1] * (2 * leaves)
        self._room = [0] * (2 * leaves)
        self._limit = [0] * (2 * leaves)
        self._degree = [0] * (2 * leaves)
        self._load = [[0] * spines for _ in range(2 * leaves)]
        self._top = 0
        self._links_with = [2 * leaves * spines]
        """How many links carry 0, 1, 2 ... flows."""
        self._here: list[list[dict[int, None]]] = [[{} for _ in range(spines)] for _ in range(2 * leaves)]

    @property
    def max_load(self) -> int:
        """Flows on the fullest uplink or downlink."""
        return self._top

    @property
    def bound(self) -> int:
        """No sharing out has a smaller `max_load`: flows of ends over their spines, of pairs over their common ones."""
        ends = (self._least(end) for end in range(2 * self.leaves) if self._degree[end])
        return max(max(ends, default=0), self._pair_bound())

    def loads(self) -> Iterator[tuple[int, int, int]]:
        """(end, spine, flows) of every link that carries something."""
        for end, load in enumerate(self._load):
            for spine, flows in enumerate(load):
                if flows:
                    yield end, spine, flows

    def settle(self) -> dict[int, int]:
        """The flows moved since the last call and still elsewhere, with their old spine; counting starts again."""
        moved = {flow: old for flow, old in self.moved.items() if self.spine_of.get(flow, old) != old}
        self.moved = {}
        return moved

    def reachable(self, source: int, destination: int) -> bool:
        """Whether a spine joins the two leaves."""
        return bool(self._allowed[source] & self._allowed[self.leaves + destination])

    def ends_of(self, flow: int) -> tuple[int, int]:
        """The source and the destination leaf of `flow`."""
        left, right = self._ends[flow]
        return left, right - self.leaves

    def add(self, flow: int, *, source: int, destination: int) -> int:
        """Give `flow` between two leaves (numbers from 0) a spine, and return it. Some spine must join them."""
        left, right = source, self.leaves + destination
        self._ends[flow] = (left, right)
        for end in (left, right):
            self._degree[end] += 1
            if self._least(end) > self._limit[end]:
                self._set_limit(end, self._least(end))
        self._place(flow, left, right=right)
        return self.spine_of[flow]

    def keep(self, flow: int, *, source: int, destination: int, spine: int) -> None:
        """Take `flow` over on the `spine` it already has, as read from a plan in force."""
        left, right = source, self.leaves + destination
        self._ends[flow] = (left, right)
        for end in (left, right):
            self._degree[end] += 1
            self._set_limit(end, max(self._limit[end], self._least(end), self._load[end][spine] + 1))
        self._put(flow, spine)

    def remove(self, flows: Iterable[int]) -> None:
        """Forget `flows`, and move others only where a link now carries more than it need to."""
        touched: dict[int, None] = {}
        for flow in flows:
            self._take(flow)
            for end in self._ends.pop(flow):
                self._degree[end] -= 1
                touched[end] = None
            del self.spine_of[flow]
        for end in touched:
            self._set_limit(end, max(self._least(end), max(self._load[end])))
        self.level()

    def forbid(self, links: Iterable[tuple[int, int]]) -> list[int]:
        """Take away `links` (end, spine): their flows move. Returns flows whose leaves no spine joins any more."""
        homeless: list[int] = []
        links = [(end, spine) for end, spine in links if self._allowed[end] >> spine & 1]
        for end, spine in links:
            self._allowed[end] &= ~(1 << spine)
            self._set_limit(end, max(self._limit[end], self._least(end)))
        for end, spine in links:
            for flow in list(self._here[end][spine]):
                left, right = self._ends[flow]
                self._take(flow)
                if self._allowed[left] & self._allowed[right]:
                    self._place(flow, left, right=right)
                else:
                    homeless.append(flow)
                    self._lose(flow)
        return homeless

    def permit(self, links: Iterable[tuple[int, int]]) -> None:
        """Give back `links` that were taken away, and use them."""
        for end, spine in links:
            self._allowed[end] |= 1 << spine
            self._set_limit(end, max(self._least(end), max(self._load[end])))
        self.level()

    def level(self) -> None:
        """Move flows off every link that carries more than the bound, and let none carry more from now on."""
        bound = self.bound
        for end, limit in enumerate(self._limit):
            if limit > bound:
                self._set_limit(end, bound)
        if self._top <= bound:
            return
        for end in [end for end, load in enumerate(self._load) if max(load) > bound]:
            for spine in range(self.spines):
                while self._load[end][spine] > bound and self._shed(end, spine):
                    pass

    def _least(self, end: int) -> int:
        """ceil(degree / spines) of one end; its degree where it has no spine."""
        return -(-self._degree[end] // (self._allowed[end].bit_count() or 1))

    def _pair_bound(self) -> int:
        """Flows between two leaves that few spines join, divided by these; 0 where nothing is missing."""
        whole = (1 << self.spines) - 1
        poor = {end for end, allowed in enumerate(self._allowed) if allowed != whole}
        if not poor:
            return 0
        pairs: dict[tuple[int, int], int] = {}
        for flow in {flow for end in poor for here in self._here[end] for flow in here}:
            pairs[self._ends[flow]] = pairs.get(self._ends[flow], 0) + 1
        common = ((count, (self._allowed[a] & self._allowed[b]).bit_count()) for (a, b), count in pairs.items())
        return max((-(-count // spines) for count, spines in common if spines), default=0)

    def _set_limit(self, end: int, limit: int) -> None:
        self._limit[end] = limit
        room = 0
        for spine, load in enumerate(self._load[end]):
            if load < limit:
                room |= 1 << spine
        self._room[end] = room & self._allowed[end]

    def _put(self, flow: int, spine: int) -> None:
        for end in self._ends[flow]:
            load = self._load[end]
            load[spine] += 1
            self._count(load[spine] - 1, load[spine])
            if load[spine] >= self._limit[end]:
                self._room[end] &= ~(1 << spine)
            self._here[end][spine][flow] = None
        self.spine_of[flow] = spine

    def _take(self, flow: int) -> None:
        spine = self.spine_of[flow]
        self.moved.setdefault(flow, spine)
        for end in self._ends[flow]:
            self._load[end][spine] -= 1
            self._count(self._load[end][spine] + 1, self._load[end][spine])
            if self._load[end][spine] < self._limit[end]:
                self._room[end] |= (1 << spine) & self._allowed[end]
            del self._here[end][spine][flow]

    def _count(self, before: int, after: int) -> None:
        """A link went from `before` to `after` flows."""
        self._links_with[before] -= 1
        if after == len(self._links_with):
            self._links_with.append(0)
        self._links_with[after] += 1
        self._top = max(self._top, after)
        while self._top and not self._links_with[self._top]:
            self._top -= 1

    def _lose(self, flow: int) -> None:
        for end in self._ends.pop(flow):
            self._degree[end] -= 1
        del self.spine_of[flow]

    def _place(self, flow: int, left: int, *, right: int) -> None:
        while not (common := self._room[left] & self._room[right]):
            starts = [(right, spine) for spine in _bits(self._room[left] & self._allowed[right])]
            starts += [(left, spine) for spine in _bits(self._room[right] & self._allowed[left])]
            if not self._clear(starts):
                for end in (left, right):
                    if not self._room[end] & self._allowed[left] & self._allowed[right]:
                        self._set_limit(end, self._limit[end] + 1)
                if not self._room[left] & self._room[right]:
                    poorer = min((left, right), key=self._limit.__getitem__)
                    self._set_limit(poorer, self._limit[poorer] + 1)
        self._put(flow, (common & -common).bit_length() - 1)

    def _clear(self, starts: list[tuple[int, int]]) -> bool:
        """Make room at one of `starts` (end, spine) without taking any elsewhere. False if that cannot be done."""
        path = self._search(starts, budget=_BUDGET)
        for start in starts if path is None else ():
            for other in _bits(self._room[start[0]] & ~(1 << start[1])):
                path = self._search([start], budget=2 * self.leaves, within=1 << start[1] | 1 << other)
                if path is not None:
                    break
            if path is not None:
                break
        for flow, spine in path or ():
            self._take(flow)
            self._put(flow, spine)
        return path is not None

    def _shed(self, end: int, spine: int) -> bool:
        return self._clear([(end, spine)])

    def _search(self, starts: list[tuple[int, int]], *, budget: int, within: int = -1) -> list[tuple[int, int]] | None:
        """The shortest list of moves (flow, new spine) that takes one flow off one of `starts`, last move first.

        An entry of the queue is an end that has one flow too many on a spine, and the spine where it lost one.
        """
        queue: deque[tuple[int, int, int]] = deque((end, spine, 0) for end, spine in starts)
        came: dict[tuple[int, int], tuple[tuple[int, int], int, int] | None] = dict.fromkeys(starts)
        while queue and budget > 0:
            budget -= 1
            end, spine, gained = queue.popleft()
            room = (self._room[end] | gained) & within & ~(1 << spine)
            for flow in self._here[end][spine]:
                left, right = self._ends[flow]
                other = right if end == left else left
                targets = room & self._allowed[other]
                if not targets or self._passed((end, spine), came, end=other):
                    continue
                if ready := targets & self._room[other]:
                    return self._trail((end, spine), came, last=(flow, (ready & -ready).bit_length() - 1))
                for target in _bits(targets):
                    if (other, target) not in came:
                        came[other, target] = ((end, spine), flow, target)
                        queue.append((other, target, 1 << spine))
        return None

    @staticmethod
    def _trail(
        state: tuple[int, int],
        came: dict[tuple[int, int], tuple[tuple[int, int], int, int] | None],
        *,
        last: tuple[int, int],
    ) -> list[tuple[int, int]]:
        moves = [last]
        step = came[state]
        while step is not None:
            state, flow, spine = step
            moves.append((flow, spine))
            step = came[state]
        return moves

    @staticmethod
    def _passed(
        state: tuple[int, int], came: dict[tuple[int, int], tuple[tuple[int, int], int, int] | None], *, end: int
    ) -> bool:
        """Whether the path to `state` already passes `end`."""
        while state[0] != end:
            step = came[state]
            if step is None:
                return False
            state = step[0]
        return True


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, from the lowest."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
