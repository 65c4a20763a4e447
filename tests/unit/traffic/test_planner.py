"""The plan of a site: arrivals, departures, failures, windows, two NIC ports; refusals leave it as it was."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, Demand, Flow, Seat
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.flows import flows_of
from keepstep.traffic.planner import Planner


def site(**changes) -> Planner:
    shape = ClosShape(**{"hosts": 16, "hosts_per_leaf": 4, "spines": 4} | changes)
    return Planner(clos(shape))


def ring(job: str, hosts: list[int], *, start_s: float = 0.0, end_s: float = 0.0) -> Demand:
    seats = tuple(Seat(rank, f"h{host}") for rank, host in enumerate(hosts))
    use = CollectiveUse("dp", "all_reduce", tuple(range(len(hosts))), 1e6, start_s=start_s, end_s=end_s)
    return Demand(job, seats, (use,))


def arrive(planner: Planner, demand: Demand):
    return planner.arrive(demand.job, flows_of(demand, planner.network))


def cable_loads(planner: Planner) -> Counter:
    hops = Counter()
    for route in planner.routes():
        for a, b in zip(route.path, route.path[1:], strict=False):
            hops[a, b, route.cable] += 1
    return hops


def test_jobs_share_out_the_spines_and_leave():
    planner = site()
    for job in range(4):
        change = arrive(planner, ring(f"j{job}", [job, 4 + job, 8 + job, 12 + job]))
        assert (change.added, change.max_load) == (4, 1)
    assert max(cable_loads(planner).values()) == 1
    assert planner.plan().gap == 0
    assert planner.leave("j1").removed == 4
    assert planner.jobs == ("j0", "j2", "j3")


@given(st.lists(st.permutations(range(16)).map(lambda hosts: hosts[:6]), min_size=1, max_size=5), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_site_always_meets_the_bound(jobs, spines):
    planner = site(spines=spines)
    degrees = Counter()
    for number, hosts in enumerate(jobs):
        demand = ring(f"j{number}", hosts)
        for flow in flows_of(demand, planner.network):
            a, b = planner.network.ports[flow.source].leaf, planner.network.ports[flow.destination].leaf
            if a != b:
                degrees["up", a] += 1
                degrees["down", b] += 1
        change = arrive(planner, demand)
        assert change.max_load == change.bound == math.ceil(max(degrees.values(), default=0) / spines)
    assert max(cable_loads(planner).values(), default=0) <= change.max_load


def test_parallel_cables_are_used_like_spines():
    planner = site(spines=2, cables=2)
    for job in range(4):
        arrive(planner, ring(f"j{job}", [job, 4 + job]))
    assert set(cable_loads(planner).values()) == {1}


def test_both_ports_of_a_nic_carry_equal_shares_left_to_left():
    planner = site(sides=2)
    flows = flows_of(ring("j", [0, 4]), planner.network)
    assert Counter(
        (planner.network.ports[f.source].side, planner.network.ports[f.destination].side) for f in flows
    ) == {
        (0, 0): 2,
        (1, 1): 2,
    }
    assert len({flow.nbytes for flow in flows}) == 1


def test_flows_that_are_never_active_together_share_a_way():
    planner = site(spines=1)
    early = CollectiveUse("early", "send", (0, 1), 1e6, start_s=0.0, end_s=0.4)
    late = CollectiveUse("late", "send", (0, 1), 1e6, start_s=0.4, end_s=0.9)
    overlapping = CollectiveUse("both", "send", (0, 1), 1e6, start_s=0.3, end_s=0.5)
    seats = (Seat(0, "h0"), Seat(1, "h4"))
    assert arrive(planner, Demand("a", seats, (early, late))).max_load == 1
    planner.leave("a")
    assert arrive(planner, Demand("b", seats, (early, late, overlapping))).max_load == 2


def test_a_failed_link_moves_its_flows_alone_and_strands_what_has_no_way():
    planner = site(spines=2)
    for job in range(4):
        arrive(planner, ring(f"j{job}", [job, 4 + job]))
    before = {route.flow: route for route in planner.routes()}
    change = planner.set_down(["leaf0>spine1"])
    changed = {route.flow for route in change.routes}
    assert changed == {flow for flow, route in before.items() if route.path[:2] == ("leaf0", "spine1")}
    assert (change.max_load, change.bound, change.stranded) == (4, 4, ())
    change = planner.set_down(["leaf0>spine0", "leaf0>spine1"])
    assert len(change.stranded) == 4
    change = planner.set_down([])
    assert (change.stranded, change.max_load) == ((), 2)


def test_a_spine_that_fails_is_avoided():
    planner = site()
    for job in range(4):
        arrive(planner, ring(f"j{job}", [job, 4 + job, 8 + job, 12 + job]))
    change = planner.set_down(["spine2"])
    assert (change.max_load, change.bound) == (2, 2)
    assert not [route for route in planner.routes() if "spine2" in route.path]


def test_a_plan_is_taken_over_from_its_routes():
    planner = site()
    demands = [ring(f"j{job}", [job, 4 + job, 8 + job, 12 + job]) for job in range(4)]
    for demand in demands:
        arrive(planner, demand)
    ways = {route.flow: (route.path, route.cable) for route in planner.routes()}
    again = site()
    for demand in demands:
        again.restore(demand.job, flows_of(demand, again.network), routes=ways)
    assert {route.flow: (route.path, route.cable) for route in again.routes()} == ways
    assert again.plan().max_load == 1


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (ring("a", [0, 4]), "already"),
        (ring("b", [0, 99]), "'h99', which is not in the topology"),
        (Demand("c", (Seat(0, "h0"),), (CollectiveUse("dp", "all_reduce", (0, 7), 1.0),)), "rank 7, which has no seat"),
        (Demand("d", (Seat(0, "h0"), Seat(0, "h1")), ()), "two seats"),
        (Demand("e", (Seat(0, "h0", 3, 2),), ()), "number 3 of 2"),
    ],
)
def test_a_demand_that_cannot_be_is_refused_and_the_plan_stays(demand, words):
    planner = site()
    arrive(planner, ring("a", [0, 4]))
    before = planner.plan()
    with pytest.raises(TrafficError, match=words):
        arrive(planner, demand)
    assert planner.plan() == before


def test_unknown_names_are_refused_and_the_plan_stays():
    planner = site()
    arrive(planner, ring("a", [0, 4]))
    before = planner.plan()
    for wrong in (["leaf0>spine9"], ["spine9"], ["leaf0>leaf1"]):
        with pytest.raises(TrafficError, match="no (link|switch)"):
            planner.set_down(wrong)
    with pytest.raises(TrafficError, match="not in the plan"):
        planner.leave("nobody")
    with pytest.raises(TrafficError, match="not plugged in"):
        planner.arrive("x", [Flow("x", "u", "h0/nope/0", "h1/nic0/0")])
    assert planner.plan() == before
