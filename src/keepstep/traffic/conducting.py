"""Makes a plan real while a job runs: watches who sends to whom, learns which ports take which way, gives out ports,
and moves what a failed or slow path carried.

Pure: everything that happened goes in with `now`, what to do comes out as actions. One job, one connection between
two ranks in each group; the rank that sends more dials.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from keepstep.errors import TrafficError
from keepstep.records.demand import Flow
from keepstep.records.path_messages import MAX_WAYS, Carried, Way
from keepstep.records.plan import Route
from keepstep.traffic.catalogue import MAX_AGE_S
from keepstep.traffic.path_actions import (
    Action,
    AskCounts,
    AskHops,
    ConductorSettings,
    GivePaths,
    Place,
    Renew,
    Seen,
    Tell,
)
from keepstep.traffic.path_counts import Ends, PathCounts, Place3
from keepstep.traffic.path_judge import PathJudge
from keepstep.traffic.planner import Change, Planner
from keepstep.traffic.source_ports import ENOUGH_WAYS, PortMap, choose_ports, unnamed_hops, unused_links
from keepstep.traffic.stalls import Stalls

__all__ = ["TrafficConductor"]

_EVERY_S = 1.0
_COUNT_EVERY_S = 0.5
_PATIENCE_S = 5.0
_WAYS_PER_S = 500  # that an agent surely probes, where some are silent
_RETRY_S, _RETRY_LONGEST_S = 5.0, 320.0
_STEPS_FIRST = 3
_STEPS_LATE = 10


class TrafficConductor:
    """One job on a fabric. Feed it with `members`, `seen`, `hops`, `counted`, `ready`, `stalled`; call `step` often."""

    def __init__(self, job: str, planner: Planner, *, settings: ConductorSettings) -> None:
        self.job = job
        self.number = 0
        self._planner = planner
        self._site_down = planner.network.down
        self._settings = settings
        self._port_of = {port.host: port.name for port in planner.network.topology.ports}
        self._leaf_of = {port.host: port.leaf for port in planner.network.topology.ports}
        self._places: dict[int, Place] = {}
        self._generation = -1
        self._judges: dict[Ends, PathJudge] = {}
        self._asked = 0
        self._strangers: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._sent: dict[tuple[int, int], float] = {}
        self._steps: dict[int, int] = {}
        self._map = PortMap()
        self._answers: dict[Way, tuple[str, ...]] = {}
        self._open: dict[int, tuple[str, tuple[Way, ...]]] = {}
        self._deadline = 0.0
        self._phase = "watching"
        self._routes: dict[tuple[int, int], tuple[str, ...]] = {}
        self._given: dict[tuple[int, int], tuple[int, ...]] = {}
        self._waiting: set[int] = set()
        self._dialling: set[int] = set()
        self._dialled: dict[int, int] = {}
        self._failed: list[str] = []
        self._retry_s, self._said = _RETRY_S, ""
        self._next = 0.0
        self._probed = 0.0
        self._stalls = Stalls()
        self._down: set[str] = set()
        self._out: set[str] = set()
        self._counts = PathCounts()
        self._counting: dict[int, tuple[Way, ...]] = {}
        self._count_next = 0.0
        for judge in self._judges.values():
            judge.forget_flows()

    @property
    def routes(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """The way in force by (from, to) rank."""
        return dict(self._routes)

    # ------------------------------------------------------------------ what happened

    def members(self, generation: int, places: Mapping[int, Place]) -> None:
        """The members of a generation; a new one starts everything over."""
        if generation != self._generation:
            self._generation, self._places = generation, dict(places)
            if self.job in self._planner.jobs:
                self._planner.leave(self.job)
            self._forget()

    def seen(self, news: Iterable[Seen], *, generation: int) -> None:
        """What members sent, from their recorders."""
        if generation != self._generation:
            return
        for one in news:
            if one.peer < 0:
                self._steps[one.rank] = self._steps.get(one.rank, 0) + one.steps
            elif one.steps and one.rank in self._places and one.peer in self._places:
                self._sent[one.rank, one.peer] = one.nbytes / one.steps

    def hops(self, number: int, hops: Sequence[Sequence[str]], *, why: str = "") -> None:
        """The answer to `AskHops` of that number."""
        node, ways = self._open.pop(number, ("", ()))
        if why and node:
            self._failed.append(f"{node}: {why}")
        for way, found in zip(ways, hops, strict=False):
            self._answers[way] = tuple(found)

    def counted(self, number: int, carried: Sequence[Carried]) -> None:
        """The answer to `AskCounts` of that number."""
        for way, one in zip(self._counting.pop(number, ()), carried, strict=False):
            self._counts.take(way, one)

    def ready(self, rank: int, number: int, *, installed: bool, why: str = "") -> None:
        """A member has dialled, or could not, or carries its collectives over the new links now."""
        if number != self.number or self._phase != "preparing":
            return
        if why:
            self._failed.append(f"rank {rank}: {why}")
        elif installed:
            self._waiting.discard(rank)
        else:
            self._dialling.discard(rank)
            self._dialled = dict(self._steps)

    def stalled(self, rank: int, peer: int, *, generation: int, now: float) -> None:
        """Nothing passes from `rank` to `peer` though a collective is under way."""
        if generation == self._generation:
            self._stalls.tell((rank, peer), now)

    # ------------------------------------------------------------------ what to do

    def step(self, now: float) -> list[Action]:
        """What to do at wall-clock time `now`; what was fed in since the last call is taken into account."""
        match self._phase:
            case "watching":
                return self._look(now)
            case "probing":
                return self._learn(now)
            case "preparing":
                return self._settle(now)
        return self._guard(now)

    def _look(self, now: float) -> list[Action]:
        enough = self._places and all(self._steps.get(rank, 0) >= _STEPS_FIRST for rank in self._places)
        if not enough or now < self._next:
            return []
        strange = sorted({place.node for place in self._places.values()} - self._leaf_of.keys() - self._strangers)
        self._strangers.update(strange)
        text = f"no host of the topology is called {', '.join(strange[:8])}; flows there are left to chance"
        news: list[Action] = [Tell(text, failed=True)] if strange else []
        return news + (self._probe(now) if self._pairs() else [])

    def _pairs(self) -> list[tuple[int, int]]:
        """Ordered pairs of ranks whose bytes pass between leaves and are worth a plan."""
        return sorted(p for p, nbytes in self._sent.items() if nbytes >= self._settings.least_bytes and self._apart(p))

    def _apart(self, pair: tuple[int, int]) -> bool:
        """Whether two ranks are below different leaves."""
        leaves = [self._leaf_of.get(self._places[rank].node, "") for rank in pair if rank in self._places]
        return len(leaves) == 2 and "" not in leaves and leaves[0] != leaves[1]

    def _connections(self) -> list[tuple[int, int]]:
        """(dialer, acceptor) of every pair: whoever sends more dials, the lower rank where both send alike."""
        found = []
        for a, b in sorted({(min(pair), max(pair)) for pair in self._pairs()}):
            ahead, back = self._sent.get((a, b), 0.0), self._sent.get((b, a), 0.0)
            found.append((b, a) if back > 1.5 * ahead else (a, b))
        return found

    def _ways(self, dialer: int, acceptor: int, *, ports: Iterable[int]) -> list[tuple[str, Way]]:
        here, there = self._places[dialer], self._places[acceptor]
        found = []
        for port in ports:
            found.append((here.node, Way(here.host, port, there.host, there.port)))
            found.append((there.node, Way(there.host, there.port, here.host, port)))
        return found

    def _ask(self, ways: Iterable[tuple[str, Way]], now: float) -> list[Action]:
        by_node: dict[str, list[Way]] = {}
        for node, way in ways:
            by_node.setdefault(node, []).append(way)
        actions: list[Action] = []
        ttls = (self._settings.ttl, self._settings.ttl + 1)
        longest = max(map(len, by_node.values()), default=0)
        self._answers, self._open, self._failed = {}, {}, []
        self._deadline = now + _PATIENCE_S + longest / _WAYS_PER_S
        for node, piece in _pieces(by_node):
            self._asked += 1
            self._open[self._asked] = (node, piece)
            actions.append(AskHops(node, self._asked, piece, ttls))
        return actions

    def _probe(self, now: float) -> list[Action]:
        self._phase = "probing"
        ways = [way for pair in self._connections() for way in self._ways(*pair, ports=self._settings.ports)]
        return self._ask(ways, now)

    def _learn(self, now: float) -> list[Action]:
        if self._open and now < self._deadline:
            return []
        if self._failed or self._open:
            nodes = sorted(node for node, _ in self._open.values())
            why = "; ".join(self._failed) or f"no answer from {', '.join(nodes)}"
            self._failed, self._open = [], {}
            return self._later(now, f"paths could not be probed ({why}); flows are left to chance")
        hops, ttl = self._settings.hops, self._settings.ttl
        wrong = unnamed_hops(self._answers, hops, switches=self._planner.network.tier, ttl=ttl)
        if wrong and not self._routes:
            return self._later(now, wrong)
        self._probed = now
        self._map.learn(self._answers, hops)
        self._stalls.drop()
        return self._replan(now)

    def _later(self, now: float, text: str) -> list[Action]:
        """Try again, later each time nothing came of it; what was said last is not said again."""
        self._phase, self._next = "watching", now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _RETRY_LONGEST_S)
        said, self._said = self._said, text
        return [] if text == said else [Tell(text, failed=True)]

    def _replan(self, now: float) -> list[Action]:
        """New routes for what is down now, ports for them, and the orders for members whose ports change."""
        try:
            change = self._planned()
        except TrafficError as error:
            return self._later(now, f"no plan: {error}")
        before, out_before = dict(self._routes), self._out
        self._out = set(self._down)
        self._routes = {self._pair_of(route): route.path for route in self._planner.routes(self.job)}
        for a, b in self._pairs():
            if (a, b) not in self._routes and (b, a) in self._routes:
                self._routes[a, b] = self._routes[b, a][::-1]
        moved = [pair for pair, path in self._routes.items() if before.get(pair, path) != path]
        given, unmet = self._chosen()
        tell = Tell(
            self._words(moved, unmet, first=not before),
            moved=len(moved),
            added=max(0, len(self._routes) - len(before)),
            max_load=change.max_load,
            bound=change.bound,
            routes=self._planner.routes(self.job),
            down=tuple(sorted(self._down)),
        )
        news: list[Action] = [tell] if moved or not before or self._out != out_before else []
        if not self._settings.act:
            self._phase = "active"
            self._next = now + _RETRY_S
            return news
        orders = self._orders(given, now)
        self._stalls.probed(useful=bool(news or orders))
        return [*news, *orders]

    def _planned_pairs(self) -> list[tuple[int, int]]:
        """The flows to plan. Where a connection carries bytes both ways and its way back mirrors the way there, one
        of the two decides: the one from the leaf that is first by name."""
        pairs = self._pairs()
        if not self._map.mirrored():
            return pairs
        both = set(pairs)

        def follows(pair: tuple[int, int]) -> bool:
            here, there = (self._leaf_of[self._places[rank].node] for rank in pair)
            return pair[::-1] in both and here > there

        return [pair for pair in pairs if not follows(pair)]

    def _unused(self) -> set[str]:
        """Links that no probed way takes any more."""
        ways: dict[Ends, list[Way]] = {}
        for pair in self._connections():
            here, there = (self._leaf_of[self._places[rank].node] for rank in pair)
            for number, (_, way) in enumerate(self._ways(*pair, ports=self._settings.ports)):
                ways.setdefault((there, here) if number % 2 else (here, there), []).append(way)
        used = {ends: self._map.used(probed) for ends, probed in ways.items()}
        return unused_links(used, {ends: self._spines(ends) for ends in ways if len(ways[ends]) >= ENOUGH_WAYS})

    def _spines(self, ends: tuple[str, str]) -> tuple[str, ...]:
        """The switches that join two leaves."""
        above = [self._planner.network.uppers[leaf].keys() for leaf in ends]
        return tuple(sorted(above[0] & above[1]))

    def _planned(self) -> Change:
        dead, slow = self._unused(), self._slow()
        self._down = dead | set(slow)
        self._stalls.take_dead(dead)
        flows = [
            Flow(self.job, f"{a}-{b}", self._port_of[self._places[a].node], self._port_of[self._places[b].node])
            for a, b in self._planned_pairs()
        ]
        planned = {flow.name for flow in self._planner.flows(self.job)}
        first = self.job not in self._planner.jobs
        if not first and not planned <= {flow.name for flow in flows}:
            self._planner.leave(self.job)
            first = True
        self._planner.set_down(self._site_down | dead)
        change = self._planner.set_rates(slow)
        if first:
            return self._planner.arrive(self.job, flows)
        more = [flow for flow in flows if flow.name not in planned]
        return self._planner.extend(self.job, more) if more else change

    def _slow(self) -> dict[str, float]:
        """The share of their rate that links give, as flows show. A link that is as fast as ever between other leaves
        is not to blame; a connection that leaves a spine leaves it in both directions where these follow each other."""
        mirrored = self._map.mirrored()
        shares: dict[str, list[float]] = {}
        for (start, end), judge in self._judges.items():
            for spine in judge.heard | set(judge.slow):
                share = judge.slow.get(spine, 1.0)
                for link in (f"{start}>{spine}", f"{spine}>{end}"):
                    shares.setdefault(link, []).append(share)
        links = {link: max(found) for link, found in shares.items() if max(found) < 1.0}
        back = {">".join(reversed(link.split(">"))): share for link, share in links.items()} if mirrored else {}
        return back | links

    @staticmethod
    def _pair_of(route: Route) -> tuple[int, int]:
        a, _, b = route.flow.split(":")[1].partition("-")
        return int(a), int(b)

    def _chosen(self) -> tuple[dict[tuple[int, int], tuple[int, ...]], int]:
        """Ports by connection for the routes, and how many connections only get a port for one direction."""
        given: dict[tuple[int, int], tuple[int, ...]] = {}
        unmet = 0
        for dialer, acceptor in self._connections():
            ahead = self._routes.get((dialer, acceptor), ())
            back = self._routes.get((acceptor, dialer), ())
            here, there = self._places[dialer], self._places[acceptor]
            ends = (here.host, there.host, there.port)
            ports, whole = choose_ports(self._map, ends, ahead=ahead[1:2], back=back[1:2])
            unmet += not whole
            if ports:
                given[dialer, acceptor] = ports
        return given, unmet

    def _orders(self, given: dict[tuple[int, int], tuple[int, ...]], now: float) -> list[Action]:
        changed = {pair for pair in {*given, *self._given} if given.get(pair) != self._given.get(pair)}
        if not changed:
            self._in_force(now)
            return []
        self._given = given
        self._stalls.plan_changed()
        self.number += 1
        self._phase, self._deadline = "preparing", now + _PATIENCE_S
        self._waiting, self._dialling, self._failed = set(self._places), set(self._places), []
        actions: list[Action] = []
        for rank in sorted(self._places):
            dial = {b: ports for (a, b), ports in given.items() if a == rank}
            accept = {a: ports for (a, b), ports in given.items() if b == rank}
            actions.append(GivePaths(rank, self.number, dial, accept))
        return actions

    def _settle(self, now: float) -> list[Action]:
        if self._failed:
            why, self._failed = "; ".join(self._failed), []
            self._given = {}
            return self._later(now, f"path plan {self.number} was not taken: {why}")
        if self._waiting and (now < self._deadline or self._boundary_is_to_come()):
            return self._push(now)
        if self._waiting:
            late, self._given = ", ".join(map(str, sorted(self._waiting)[:8])), {}
            return self._later(now, f"path plan {self.number} is not in force on ranks {late}; it is given again")
        self._in_force(now)
        return [Tell(f"path plan {self.number} is in force on all {len(self._places)} members")]

    def _boundary_is_to_come(self) -> bool:
        """Whether all have dialled and have not made many steps since: a step may take longer than dialling."""
        steps = [self._steps.get(rank, 0) - self._dialled.get(rank, 0) for rank in self._waiting]
        return not self._dialling and min(steps) < _STEPS_LATE

    def _in_force(self, now: float) -> None:
        """The connections are on their ports: what they carry is counted from here on."""
        self._phase, self._next = "active", now + _EVERY_S
        self._retry_s, self._said = _RETRY_S, ""
        self._counts.follow(dict(self._places3()), now=now)

    def _push(self, now: float) -> list[Action]:
        """A collective that waits for a dead link never ends, and no boundary comes: have it cut, once a plan."""
        stalled = self._stalls.to_cut(now)
        return [Renew(*stalled)] if stalled else []

    def _guard(self, now: float) -> list[Action]:
        """In force: look whether the ports still lead where they should, and whether their bytes come through."""
        if self._judged(now):
            return self._replan(now)
        counts = self._count(now)
        if self._open:
            if now < self._deadline:
                return counts
            self._open = {}
        if self._answers:
            answers, self._answers = self._answers, {}
            if self._map.strayed(answers, self._settings.hops):
                return self._probe(now)
        stalled = self._stalls.left_out(now, apart=self._apart)
        if stalled:
            return [Renew(*stalled)]
        if self._stalls.due(now) or now - self._probed > MAX_AGE_S:
            return self._probe(now)
        if now < self._next:
            return counts
        self._next = now + _EVERY_S
        ways = [way for pair, ports in self._given.items() for way in self._ways(*pair, ports=ports[:2])]
        return counts + (self._ask(ways, now) if ways else [])

    # ------------------------------------------------------------------ how fast paths are

    def _places3(self) -> Iterator[tuple[Way, Place3]]:
        """Every way that may be in use over a spine of the topology, with its ranks, leaves and that spine."""
        for pair, ports in self._given.items():
            here, there = (self._leaf_of[self._places[rank].node] for rank in pair)
            known = self._spines((here, there))
            for number, (_, way) in enumerate(self._ways(*pair, ports=ports)):
                back, spine = number % 2, self._map.spine(way)
                if spine in known:
                    yield way, (pair[::-1], (there, here), spine) if back else (pair, (here, there), spine)

    def _count(self, now: float) -> list[Action]:
        """Ask every agent what the connections of its node have carried, when the last answers are in or late."""
        if now < self._count_next or (self._counting and now < self._count_next + _EVERY_S):
            return []
        self._count_next = now + _COUNT_EVERY_S
        by_node: dict[str, list[Way]] = {}
        for pair, ports in self._given.items():
            for node, way in self._ways(*pair, ports=ports):
                by_node.setdefault(node, []).append(way)
        self._counting = {}
        actions: list[Action] = []
        for node, piece in _pieces(by_node):
            self._asked += 1
            self._counting[self._asked] = piece
            actions.append(AskCounts(node, self._asked, piece))
        return actions

    def _judged(self, now: float) -> bool:
        """Whether a path gives another share of its rate than it did, or is tried again."""
        changed = False
        for judge in self._judges.values():
            changed |= bool(judge.due(now).raised)
        if self._counting:
            return changed
        for ends, flows in self._counts.heard(now).items():
            if ends not in self._judges:
                self._judges[ends] = PathJudge(self._spines(ends))
            verdict = self._judges[ends].look(flows, now=now)
            changed |= bool(verdict.lowered or verdict.raised)
        return changed

    def _states(self) -> list[str]:
        slow = self._planner.network.rates
        return [f"{link} at {slow[link]:.0%}" if link in slow else link for link in sorted(self._down)]

    def _words(self, moved: Sequence[tuple[int, int]], unmet: int, *, first: bool) -> str:
        ways = {pair: "-".join(path) for pair, path in self._routes.items()}
        if first:
            text = f"{len(ways)} flows between leaves get ways of their own"
        else:
            what = ", ".join(f"{a}>{b} over {ways[a, b]}" for a, b in sorted(moved)[:8])
            text = f"{len(moved)} of {len(ways)} flows move: {what}" if moved else "no flow moves"
        if self._down:
            text += f"; out of use or slow: {', '.join(self._states())}"
        if unmet:
            text += f"; {unmet} connections have no port that suits both directions"
        return text if self._settings.act else f"would do: {text}"


def _pieces(by_node: Mapping[str, Sequence[Way]]) -> Iterator[tuple[str, tuple[Way, ...]]]:
    """The ways of each node, as many at once as an agent answers."""
    for node, ways in by_node.items():
        for start in range(0, len(ways), MAX_WAYS):
            yield node, tuple(ways[start : start + MAX_WAYS])
