"""The flow-level model against closed forms: shared links, hashing, collectives, the price of collisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, Demand, Flow, Seat
from keepstep.records.plan import Route
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.collision import collision_cost
from keepstep.traffic.fairness import finish_times, max_min
from keepstep.traffic.flows import flows_of
from keepstep.traffic.hashing import chance_of_collision, expected_fullest, hashed_ports, hashed_routes
from keepstep.traffic.model import compare, flow_rates, model
from keepstep.traffic.network import Network
from keepstep.traffic.observed import MeasuredUse, Observed
from keepstep.traffic.planner import Planner
from keepstep.traffic.published import c4p_figures


def test_flows_on_one_link_share_it():
    assert max_min([[0]] * 5, [100.0]).tolist() == [20.0] * 5


def test_what_one_link_leaves_the_others_take():
    """Bertsekas and Gallager: three flows on a link of 3, one of them also on a link of 10 with a fourth."""
    assert max_min([[0], [0], [0, 1], [1]], [3.0, 10.0]).tolist() == [1.0, 1.0, 1.0, 9.0]


def test_a_flow_without_links_is_not_limited():
    assert max_min([[], [0]], [4.0]).tolist() == [float("inf"), 4.0]


def test_an_ended_flow_leaves_its_share_to_the_others():
    """On a link of 4 with 1, 3 and 5 to carry: 4/3 each until 0.75, 2 each until 1.75, then 4."""
    assert finish_times([[0]] * 4, [4.0], sizes=[5.0, 0.0, 1.0, 3.0]).tolist() == pytest.approx([2.25, 0.0, 0.75, 1.75])


def test_ends_of_many_flows_are_close_to_the_exact_ones():
    """One link: the flow of rank k from below ends when all smaller ones and its own part of the others are carried."""
    sizes = np.random.default_rng(5).uniform(1.0, 3.0, 400)
    rest = np.sort(sizes)
    exact = np.cumsum(np.diff(rest, prepend=0.0) * np.arange(400, 0, -1))
    found = finish_times([[0]] * 400, [1.0], sizes=sizes.tolist())[np.argsort(sizes)]
    assert (found >= exact * (1 - 1e-9)).all()
    assert (found <= exact * 1.1).all()


@st.composite
def loads(draw):
    links = draw(st.integers(1, 6))
    flows = draw(st.lists(st.sets(st.integers(0, links - 1), min_size=1, max_size=4), min_size=1, max_size=14))
    capacity = draw(st.lists(st.floats(0.5, 100.0), min_size=links, max_size=links))
    return [sorted(flow) for flow in flows], capacity


@given(loads())
@settings(max_examples=200, deadline=None)
def test_max_min_fairness(case):
    """Feasible, and every flow crosses a full link on which no flow is faster (the definition's equivalent)."""
    flows, capacity = case
    rates = max_min(flows, capacity)
    used = np.zeros(len(capacity))
    for links, rate in zip(flows, rates, strict=True):
        used[links] += rate
    assert (used <= np.array(capacity) * (1 + 1e-6)).all()
    for links, rate in zip(flows, rates, strict=True):
        assert any(
            used[link] >= capacity[link] * (1 - 1e-6)
            and all(rate >= other * (1 - 1e-6) for of, other in zip(flows, rates, strict=True) if link in of)
            for link in links
        )


@pytest.mark.parametrize(
    ("flows", "ways", "expected"), [(1, 8, 1.0), (4, 1, 4.0), (2, 2, 1.5), (2, 4, 1.25), (0, 4, 0.0)]
)
def test_the_fullest_way_by_hand(flows, ways, expected):
    assert expected_fullest(flows, ways) == pytest.approx(expected)


def test_the_birthday_problem():
    assert chance_of_collision(2, 4) == pytest.approx(0.25)
    assert chance_of_collision(23, 365) == pytest.approx(0.5073, abs=1e-4)
    assert chance_of_collision(5, 4) == 1.0


def star(spines: int = 8) -> Network:
    return Network(clos(ClosShape(hosts=16, hosts_per_leaf=8, spines=spines, port_gbps=400.0, uplink_gbps=400.0)))


def across(count: int, nbytes: float = 1e9) -> list[Flow]:
    return [Flow(f"j{n}", "u", f"h{n}/nic0/0", f"h{8 + n}/nic0/0", nbytes) for n in range(count)]


def test_hashing_agrees_with_the_closed_form():
    """8 flows on 8 spines: the mean of the fullest over many seeds is the expected one (2.597)."""
    network, flows = star(), across(8)
    fullest = []
    for seed in range(800):
        spines = [route.path[1] for route in hashed_routes(flows, network, seed=seed)]
        fullest.append(max(spines.count(spine) for spine in set(spines)))
    assert np.mean(fullest) == pytest.approx(expected_fullest(8, 8), abs=0.08)


def test_a_seed_repeats_and_seeds_differ():
    network, flows = star(), across(8)
    assert hashed_routes(flows, network, seed=3) == hashed_routes(flows, network, seed=3)
    assert hashed_routes(flows, network, seed=3) != hashed_routes(flows, network, seed=4)


def test_hashing_avoids_what_is_down():
    network, flows = star(2), across(8)
    network.set_down(["leaf0>spine0"])
    assert {route.path[1] for route in hashed_routes(flows, network, seed=1)} == {"spine1"}


def test_two_flows_on_a_spine_take_twice_as_long():
    network, flows = star(), across(2)
    shared = [Route(flow.name, ("leaf0", "spine0", "leaf1")) for flow in flows]
    apart = [Route(flow.name, ("leaf0", f"spine{n}", "leaf1")) for n, flow in enumerate(flows)]
    assert model(flows, shared, network=network).seconds("j0") == pytest.approx(
        2 * model(flows, apart, network=network).seconds("j0")
    )
    assert model(flows, apart, network=network).seconds("j0") == pytest.approx(8 / 400)


@pytest.mark.parametrize(("spines", "ratio"), [(8, 1), (4, 2), (2, 4)])
def test_oversubscription(spines, ratio):
    """8 planned flows of one leaf at 1:1, 2:1, 4:1 get the leaf's uplinks shared equally."""
    network = star(spines)
    planner = Planner(network.topology)
    for flow in across(8):
        planner.arrive(flow.job, [flow])
    rates = flow_rates(across(8), {route.flow: route for route in planner.routes()}, network=network)
    assert set(rates.values()) == {400.0 / ratio}


def test_flows_of_other_times_do_not_compete():
    network = star(1)
    early, late = (
        Flow("j", "early", "h0/nic0/0", "h8/nic0/0", 1e9, 0.0, 0.5),
        Flow("j", "late", "h1/nic0/0", "h9/nic0/0", 1e9, 0.5, 1.0),
    )
    routes = [Route(flow.name, ("leaf0", "spine0", "leaf1")) for flow in (early, late)]
    assert set(model([early, late], routes, network=network).rates.values()) == {400.0}


def test_a_byte_on_the_same_port_costs_a_large_flow_nothing():
    """Whether the windows of the two cover each other or only touch."""
    network = star()
    large = Flow("j", "reduce", "h0/nic0/0", "h8/nic0/0", 1e9, 0.0, 0.02)
    tiny = Flow("j", "start", "h0/nic0/0", "h8/nic0/0", 1.0, 0.0099, 0.0186)
    routes = [Route(flow.name, ("leaf0", "spine0", "leaf1")) for flow in (large, tiny)]
    both = model([large, tiny], routes, network=network)
    assert both.seconds() == pytest.approx(model([large], routes, network=network).seconds())
    assert both.rates[large.name] == pytest.approx(400.0)


def test_a_ring_takes_two_n_minus_one_over_n_bytes():
    """4 hosts, 1 GB, 400 Gbit/s: 2 x 3/4 GB over each edge, 30 ms."""
    network = star()
    seats = tuple(Seat(rank, f"h{host}") for rank, host in enumerate((0, 8, 1, 9)))
    demand = Demand("j", seats, (CollectiveUse("dp", "all_reduce", (0, 1, 2, 3), 1e9),))
    planner = Planner(network.topology)
    flows = flows_of(demand, network)
    planner.arrive("j", flows)
    assert model(flows, planner.routes(), network=network).seconds() == pytest.approx(0.030)
    (found,) = compare(flows, planner.routes(), network=network, seeds=range(5))
    assert found.hashed_s[0] <= found.hashed_s[1] <= found.hashed_s[2]
    assert found.gain >= 1.0


def test_a_route_over_a_dead_link_is_refused():
    network, flows = star(), across(1)
    network.set_down(["spine0"])
    with pytest.raises(TrafficError, match="down"):
        flow_rates(flows, {flows[0].name: Route(flows[0].name, ("leaf0", "spine0", "leaf1"))}, network=network)
    with pytest.raises(TrafficError, match="no route"):
        flow_rates(flows, {}, network=network)


def test_a_bonded_nic_without_a_plan_uses_any_port():
    network = Network(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2, sides=2)))
    flows = [Flow("j", "u", f"h0/nic0/{side}", f"h2/nic0/{side}", 1.0, part=n) for n in range(20) for side in range(2)]
    found = hashed_ports(flows, network, seed=0)
    assert {flow.source for flow in found} == {"h0/nic0/0", "h0/nic0/1"}
    assert any(flow.source[-1] != flow.destination[-1] for flow in found)


def test_the_published_test_has_the_shape_of_its_result():
    """Only what must follow from the inputs; the published numbers are second-hand and not asserted."""
    figures = {one.name: one.modelled for one in c4p_figures(range(5))}
    assert figures["8 jobs, 1:1, planned"] == pytest.approx((360.0, 360.0, 360.0))
    assert figures["8 jobs, 1:1, hashed"][1] < 360.0
    assert (
        figures["one of 8 uplinks down, hashed"][1] < figures["one of 8 uplinks down, planned, equal shares"][0] <= 315
    )
    assert figures["both ports of a NIC, hashed"][1] < figures["both ports of a NIC, planned"][0]


def observed(total_s: float, wait_s: float) -> Observed:
    seats = (Seat(0, "h0"), Seat(1, "h8"))
    return Observed(Demand("j0", seats, ()), (MeasuredUse("u", total_s, 0.0, wait_s),), 10)


@pytest.mark.parametrize(
    ("total_s", "wait_s", "lost_s"),
    [
        (0.040, 0.030, 0.020),  # exactly as the model says: half of it is the collision
        (0.040, 0.010, 0.010),  # never more than the waiting
        (0.025, 0.025, 0.005),  # never more than what exceeds the ideal of 20 ms
        (0.015, 0.010, 0.0),  # faster than the model: nothing
    ],
)
def test_the_price_of_a_collision(total_s, wait_s, lost_s):
    network, flows = star(), across(2)
    ideal = model(flows, [Route(f.name, ("leaf0", f"spine{n}", "leaf1")) for n, f in enumerate(flows)], network=network)
    actual = model(flows, [Route(f.name, ("leaf0", "spine0", "leaf1")) for f in flows], network=network)
    cost = collision_cost(observed(total_s, wait_s), ideal, actual=[actual], steps=1000)
    assert cost.collision_s[1] == pytest.approx(lost_s)
    assert cost.gpu_hours[1] == pytest.approx(lost_s * 1000 * 2 / 3600)
    assert cost.fits == (total_s >= 0.020)
