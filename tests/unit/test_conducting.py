"""A plan made real on a fabric that hashes: ports for ways of their own, and only the flows of a lost way move."""

from __future__ import annotations

import zlib

import pytest

from keepstep.records.path_messages import Carried, Way
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.conducting import TrafficConductor
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
from keepstep.traffic.planner import Planner

HOSTS, SPINES = 8, 4
NAMES = {f"10.1{leaf}.{spine}.2": f"spine{spine}" for leaf in range(18) for spine in range(SPINES)}
PORTS = tuple(range(42000, 42128))


class World:
    """A leaf-spine fabric whose leaves hash, members that do what they are told, and a clock."""

    def __init__(
        self,
        pairs: list[tuple[int, int]],
        *,
        settings: ConductorSettings | None = None,
        hosts: int = HOSTS,
        down: tuple[str, ...] = (),
        seed: int = 0,
        mirrored: bool = False,
    ) -> None:
        self.mirrored = mirrored
        planner = Planner(clos(ClosShape(hosts=hosts, hosts_per_leaf=4, spines=SPINES)), down=down)
        settings = settings or ConductorSettings(hops=NAMES, ports=PORTS)
        self.conductor = TrafficConductor("job", planner, settings=settings)
        self.places = {rank: Place(f"h{rank}", f"10.0.0.{rank}", 5000 + rank) for rank in range(hosts)}
        self.pairs = pairs
        self.seed = seed
        self.now = 100.0
        self.up = set(range(SPINES))
        self.cut: set[tuple[int, int]] = set()  # (leaf, spine) of links up that are gone
        self.silent: set[int] = set()
        self.speed = dict.fromkeys(range(SPINES), 1e8)  # of a leaf's link to that spine, bytes per s
        self.host_speed = dict.fromkeys(range(hosts), 1e8)
        self.carried: dict[Way, Carried] = {}
        self.asked_hops = 0
        self.ports: dict[tuple[int, int], int] = {}
        self.told: list[Tell] = []
        self.renewed: list[Renew] = []
        self.given: list[GivePaths] = []
        self.prepared: list[GivePaths] = []
        self.refuse = ""
        self.boundary = 0.0  # no step ends before
        self.conductor.members(0, self.places)

    def spine(self, way: Way) -> int:
        """The hash of the leaf: stable, and different for each direction unless mirrored."""
        if self.mirrored and way.source > way.destination:
            way = Way(way.destination, way.port, way.source, way.source_port)
        up = sorted(spine for spine in self.up if (self.leaf(way.source), spine) not in self.cut)
        return up[zlib.crc32(f"{self.seed} {way}".encode()) % 1009 % len(up)]

    @staticmethod
    def leaf(address: str) -> int:
        return int(address.rsplit(".", 1)[1]) // 4

    def hop(self, way: Way) -> tuple[str, str]:
        spine, leaf, beyond = self.spine(way), self.leaf(way.source), self.leaf(way.destination)
        return ("", "") if spine in self.silent else (f"10.1{leaf}.{spine}.2", f"10.1{beyond}.0.1")

    def way(self, a: int, b: int) -> Way:
        """The way that bytes of a to b take now; a random port where none was given."""
        dialer, acceptor = (a, b) if (a, b) in self.ports or (b, a) not in self.ports else (b, a)
        port = self.ports.get((dialer, acceptor), 60000 + a)
        here, there = self.places[dialer], self.places[acceptor]
        if (a, b) != (dialer, acceptor):
            return Way(there.host, there.port, here.host, port)
        return Way(here.host, port, there.host, there.port)

    def route(self, a: int, b: int) -> int:
        return self.spine(self.way(a, b))

    def flow_speed(self, a: int, b: int) -> float:
        """Fair shares of the link to the spine, and what the host can send."""
        return min(self.host_speed[a], self.speed[self.route(a, b)] / self.loads()[a // 4, self.route(a, b)])

    def train(self) -> None:
        if self.now < self.boundary:
            return
        if not self.stuck():
            self.change_over()
        seen = [Seen(rank, -1, 5) for rank in self.places]
        for a, b in self.pairs:
            way = self.way(a, b)
            if self.spine(way) in self.silent:
                self.conductor.stalled(a, b, generation=0, now=self.now)
                continue
            seen.append(Seen(a, b, 5, 5e6))
            have = self.carried.get(way, Carried())
            busy = int(5e6 / self.flow_speed(a, b) * 1e6)
            self.carried[way] = Carried(have.nbytes + 5_000_000, have.busy_us + busy)
        self.conductor.seen(seen, generation=0)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.train()
            for action in self.conductor.step(self.now):
                self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case AskCounts():
                self.conductor.counted(action.number, [self.carried.get(way, Carried()) for way in action.ways])
            case AskHops():
                self.asked_hops += len(action.ways)
                hops = [] if self.refuse else [self.hop(way) for way in action.ways]
                self.conductor.hops(action.number, hops, why=self.refuse)
            case GivePaths():
                self.given.append(action)
                self.prepared.append(action)
                if self.now < self.boundary:
                    self.conductor.ready(action.rank, action.number, installed=False)
                elif not self.stuck():
                    self.change_over()
            case Renew():
                self.renewed.append(action)
                self.change_over()
            case Tell():
                self.told.append(action)

    def stuck(self) -> bool:
        """Whether a collective waits for ever, so that no boundary comes."""
        return any(self.route(*pair) in self.silent for pair in self.pairs)

    def change_over(self) -> None:
        for order in self.prepared:
            self.ports = {pair: port for pair, port in self.ports.items() if pair[0] != order.rank}
            self.ports |= {(order.rank, peer): ports[0] for peer, ports in order.dial.items()}
            self.conductor.ready(order.rank, order.number, installed=True)
        self.prepared.clear()

    def loads(self) -> dict[tuple[int, int], int]:
        """Flows by (leaf of the source, spine)."""
        found: dict[tuple[int, int], int] = {}
        for a, b in self.pairs:
            key = (a // 4, self.route(a, b))
            found[key] = found.get(key, 0) + 1
        return found


BOTH_WAYS = [(a, a + 4) for a in range(4)] + [(a + 4, a) for a in range(4)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("pairs", [BOTH_WAYS, [(a, a + 4) for a in range(4)]], ids=["both ways", "one way"])
def test_every_flow_gets_a_way_of_its_own(pairs: list[tuple[int, int]], mirrored: bool, seed: int) -> None:
    world = World(pairs, seed=seed, mirrored=mirrored)
    world.run(5)
    assert max(world.loads().values()) == 1
    assert any("in force on all 8 members" in tell.text for tell in world.told)
    assert world.renewed == []


def test_nothing_changes_while_nothing_changes() -> None:
    world = World(BOTH_WAYS)
    world.run(60)
    assert {order.number for order in world.given} == {1}


def test_a_spine_that_is_gone_moves_only_the_flows_that_strayed() -> None:
    world = World(BOTH_WAYS)
    world.run(5)
    before = {pair: world.route(*pair) for pair in world.pairs}
    told = len(world.told)
    world.up.discard(2)
    world.run(3)
    assert max(world.loads().values()) == 2
    change = world.told[told]
    assert change.moved == sum(spine == 2 for spine in before.values())
    assert {"leaf0>spine2", "spine2>leaf1"} <= set(change.down)


def test_a_spine_that_swallows_everything_is_left_and_links_are_made_anew() -> None:
    world = World(BOTH_WAYS)
    world.run(5)
    world.silent.add(1)
    world.run(3)
    assert all(world.route(*pair) != 1 for pair in world.pairs)
    assert len(world.renewed) == 1


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("pairs", [BOTH_WAYS, [(a, a + 4) for a in range(4)]], ids=["both ways", "one way"])
def test_a_slow_path_is_left_and_only_its_flows_move(pairs: list[tuple[int, int]], mirrored: bool) -> None:
    world = World(pairs, mirrored=mirrored)
    world.run(8)
    before = {pair: world.route(*pair) for pair in world.pairs}
    told = len(world.told)
    world.speed[3] = 1e7
    world.run(3)
    assert all(world.route(*pair) != 3 for pair in world.pairs)
    change = next(tell for tell in world.told[told:] if tell.moved)
    assert {"leaf0>spine3", "spine3>leaf1"} <= set(change.down)
    assert all(world.route(*pair) == spine for pair, spine in before.items() if spine != 3)


def test_a_path_that_was_left_is_tried_again_less_and_less_often_and_kept_when_it_is_well() -> None:
    world = World(BOTH_WAYS)
    world.run(8)
    world.speed[3] = 1e7
    used_again = []
    on_it = [False]
    for _ in range(960):
        world.run(0.25)
        on_it.append(any(world.route(*pair) == 3 for pair in world.pairs))
        if on_it[-1] and not on_it[-2]:
            used_again.append(world.now)
    waits = [later - earlier for earlier, later in zip(used_again, used_again[1:], strict=False)]
    assert len(waits) >= 2 and all(later > 1.5 * earlier for earlier, later in zip(waits, waits[1:], strict=False))
    assert sum(on_it) < 0.15 * len(on_it)
    world.speed[3] = 1e8
    world.run(400)
    plans = len(world.given)
    assert max(world.loads().values()) == 1
    world.run(200)
    assert len(world.given) == plans


def test_of_many_flows_a_slow_path_keeps_as_many_as_it_can_carry() -> None:
    """All pairs between two leaves: four on every spine; one spine at half its rate keeps two or three of its four."""
    world = World([(a, b) for a in range(4) for b in range(4, 8)])
    world.run(8)
    assert set(world.loads().values()) == {4}
    world.speed[3] = 5e7
    world.run(10)
    assert world.loads()[0, 3] in (2, 3)
    plans = world.given[-1].number
    world.run(200)
    assert world.given[-1].number <= plans + 2 * 3, "tried again after 30, 60 and 120 s at most: there and back"
    world.speed[3] = 1e8
    world.run(200)
    assert set(world.loads().values()) == {4}


def test_a_slow_host_is_not_taken_for_a_slow_path() -> None:
    """Its flows are as slow on another spine; the spine comes back at once, and nothing more moves."""
    world = World(BOTH_WAYS)
    world.run(8)
    world.host_speed[2] = 1e7
    world.run(20)
    assert max(world.loads().values()) == 1
    plans = world.given[-1].number
    world.run(300)
    assert world.given[-1].number == plans


def test_a_path_that_became_half_as_fast_is_kept_where_no_other_has_more_to_give() -> None:
    """Of four flows on four spines the one that moves would get half of another spine, and so would the flow there."""
    world = World([(a, a + 4) for a in range(4)])
    world.run(8)
    world.speed[3] = 6e7
    world.run(60)
    assert {order.number for order in world.given} == {1}


def test_uneven_numbers_of_flows_are_not_taken_for_slow_paths() -> None:
    world = World([(a, a + 4) for a in range(4)] + [(0, 5)])
    world.run(120)
    assert {order.number for order in world.given} == {1}


def test_the_only_flow_leaves_a_path_that_became_slow() -> None:
    """Nothing to compare it with but itself."""
    world = World([(0, 4)])
    world.run(10)
    at = world.route(0, 4)
    world.speed[at] = 1e7
    world.run(4)
    assert world.route(0, 4) != at


def test_a_link_that_no_plan_moves_is_made_anew_once_where_a_way_has_died() -> None:
    """A vote of one byte may happen to pass over the spine that a large flow leaves: it is stuck there for ever."""
    world = World([(0, 4)])
    world.run(8)
    world.silent.add((world.route(0, 4) + 1) % SPINES)
    for _ in range(24):
        world.conductor.stalled(1, 5, generation=0, now=world.now)
        world.run(0.25)
    assert [(one.rank, one.peer) for one in world.renewed] == [(1, 5)]


def test_a_way_that_was_dead_before_the_links_stood_cuts_nothing() -> None:
    """A rank that validates for long, on a fabric that lost a spine days ago."""
    world = World([(0, 4)])
    world.silent.add(next(spine for spine in range(SPINES) if spine != world.route(0, 4)))
    world.run(8)
    for _ in range(60):
        world.conductor.stalled(1, 5, generation=0, now=world.now)
        world.run(0.25)
    assert world.renewed == []


def test_a_link_that_stands_still_for_another_reason_costs_little() -> None:
    """A rank that computes for minutes: nothing is wrong with any path, and nobody is told so over and over."""
    world = World(BOTH_WAYS)
    world.run(8)
    told, probed = len(world.told), world.asked_hops
    for _ in range(480):
        world.conductor.stalled(0, 4, generation=0, now=world.now)
        world.run(0.25)
    usual = 120 * 2 * len(BOTH_WAYS) * 2
    assert len(world.told) == told
    assert world.asked_hops - probed < usual + 10 * 2 * 128 * 4


def test_advice_gives_nobody_a_port() -> None:
    world = World(BOTH_WAYS, settings=ConductorSettings(hops=NAMES, ports=PORTS, act=False))
    world.run(5)
    assert world.given == []
    assert world.told[0].text.startswith("would do: 8 flows")


def test_an_agent_that_may_not_probe_leaves_flows_to_chance_and_says_why() -> None:
    world = World(BOTH_WAYS)
    world.refuse = "raw sockets are not allowed"
    world.run(8)
    assert world.given == []
    assert "raw sockets are not allowed" in world.told[0].text
    assert world.told[0].failed
    assert len(world.told) <= 2


def test_nodes_that_are_no_hosts_of_the_topology_are_named_once() -> None:
    world = World(BOTH_WAYS)
    world.places[2] = Place("elsewhere", "10.0.0.2", 5002)
    world.conductor.members(1, world.places)
    for _ in range(40):
        world.now += 0.25
        world.conductor.seen([Seen(rank, -1, 5) for rank in world.places], generation=1)
        for action in world.conductor.step(world.now):
            world.obey(action)
    (tell,) = world.told
    assert tell.failed and "called elsewhere;" in tell.text


def test_what_cannot_be_is_said_once_and_tried_less_and_less_often() -> None:
    world = World(BOTH_WAYS)
    world.refuse = "raw sockets are not allowed"
    world.run(600)
    assert len(world.told) == 1
    assert world.asked_hops < 12 * 2 * 128 * 4
    world.refuse = ""
    world.run(400)
    assert max(world.loads().values()) == 1


def test_a_probing_that_failed_while_a_plan_was_in_force_is_no_fault_of_the_next_plan() -> None:
    world = World(BOTH_WAYS)
    world.run(5)
    world.refuse = "no buffer space"
    world.run(2)
    world.refuse = ""
    told = len(world.told)
    world.up.discard(2)
    world.run(3)
    assert max(world.loads().values()) == 2
    assert world.told[told].moved


def in_a_long_step(seconds: float) -> World:
    """Members that have dialled for plan 1 and are in the middle of a step."""
    world = World(BOTH_WAYS)
    world.run(0.25)
    world.boundary = world.now + seconds
    world.run(2)
    assert {order.number for order in world.given} == {1} and len(world.prepared) == HOSTS
    return world


def test_a_plan_waits_for_the_end_of_a_step_that_takes_long() -> None:
    world = in_a_long_step(40)
    world.run(45)
    assert {order.number for order in world.given} == {1}
    assert max(world.loads().values()) == 1
    assert any("in force on all 8 members" in tell.text for tell in world.told)


def test_a_plan_of_which_a_member_never_told_is_given_again_after_some_steps() -> None:
    world = in_a_long_step(8)
    world.prepared.pop()
    world.run(20)
    assert {order.number for order in world.given} == {1, 2}
    assert "plan 2 is in force on all 8 members" in world.told[-1].text


def test_a_link_that_is_gone_does_not_move_flows_of_other_leaves_over_its_spine() -> None:
    world = World([(a, a + 4) for a in range(4)] + [(8, 4), (9, 5), (10, 6)], hosts=12)
    world.run(5)
    before = {pair: world.route(*pair) for pair in world.pairs}
    assert any(spine == 2 and a >= 8 for (a, _), spine in before.items())
    told = len(world.told)
    world.cut.add((0, 2))
    world.run(3)
    change = world.told[told]
    assert (change.moved, change.down) == (1, ("leaf0>spine2",))
    assert [pair for pair, spine in before.items() if world.route(*pair) != spine and pair[0] >= 8] == []


def test_a_flow_that_came_later_moves_no_others() -> None:
    world = World([(a, a + 4) for a in range(4)])
    world.run(8)
    before = {pair: world.route(*pair) for pair in world.pairs}
    world.pairs.append((0, 5))
    world.up.discard(3)
    world.run(3)
    assert max(world.loads().values()) == 2
    assert all(world.route(*pair) == spine for pair, spine in before.items() if spine != 3)


def test_what_is_down_at_the_site_is_not_used() -> None:
    world = World(BOTH_WAYS, down=("spine3",))
    world.run(5)
    assert {world.route(*pair) for pair in world.pairs} == {0, 1, 2}


@pytest.mark.parametrize("seed", [4, 16])
def test_a_slow_switch_that_the_file_does_not_name_ends_nothing(seed: int) -> None:
    """Few ports, and one spine unknown to one leaf: bytes come back over it where no port suits both directions."""
    names = {address: spine for address, spine in NAMES.items() if address != "10.11.3.2"}
    world = World(BOTH_WAYS, settings=ConductorSettings(hops=names, ports=PORTS[:16]), seed=seed)
    world.run(8)
    world.speed[3] = 1e7
    world.run(20)
    assert not any("no link" in tell.text for tell in world.told)


@pytest.mark.parametrize("silent", [False, True])
def test_hops_that_never_answer_are_said_once_and_nothing_is_planned(silent: bool) -> None:
    """As where the ttl is wrong: other addresses answer, or none."""
    names = {"10.99.0.2": "spine0"}
    world = World(BOTH_WAYS, settings=ConductorSettings(hops=names, ports=PORTS))
    world.silent = set(range(SPINES)) if silent else set()
    world.conductor.seen([Seen(a, b, 5, 5e6) for a, b in BOTH_WAYS], generation=0)
    world.run(60)
    (tell,) = world.told
    assert tell.failed and "no answer came from an address in [hops] at ttl 2 (" in tell.text
    assert ("nobody answers" if silent else "only from 10.10.0.2, ") in tell.text
    assert world.given == []


def test_small_flows_and_flows_inside_a_leaf_are_left_alone() -> None:
    world = World([(0, 1), (1, 0)])
    world.run(5)
    assert world.told == world.given == []


def test_a_new_generation_starts_over_with_its_own_places() -> None:
    world = World(BOTH_WAYS)
    world.run(5)
    world.places[5] = Place("h5", "10.0.0.5", 7777)
    world.conductor.members(1, world.places)
    world.ports.clear()
    assert all(order.number == 1 for order in world.given)
    for _ in range(20):
        world.now += 0.25
        world.conductor.seen([Seen(rank, -1, 5) for rank in world.places], generation=1)
        world.conductor.seen([Seen(a, b, 5, 5e6) for a, b in world.pairs], generation=1)
        for action in world.conductor.step(world.now):
            world.obey(action)
    assert max(order.number for order in world.given) == 2
    assert max(world.loads().values()) == 1
