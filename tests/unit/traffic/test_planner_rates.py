"""Links that give less than their capacity carry fewer flows, and as many as ever when they recover."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import TrafficError
from keepstep.records.demand import Flow
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.planner import Planner


def planner(flows: list[tuple[int, int]], *, leaves: int = 4, spines: int = 4, each: int = 8) -> Planner:
    made = Planner(clos(ClosShape(hosts=leaves * each, hosts_per_leaf=each, spines=spines)))
    ports = [port.name for port in made.network.topology.ports]
    made.arrive("j", [Flow("j", f"{n}", ports[a], ports[b]) for n, (a, b) in enumerate(flows)])
    return made


def on(made: Planner, link: str) -> int:
    a, b = link.split(">")
    return sum((a, b) in zip(route.path, route.path[1:], strict=False) for route in made.routes("j"))


EIGHT = [(n, n + 8) for n in range(8)]


def test_a_slow_link_carries_less_only_its_flows_move_and_all_comes_back():
    made = planner(EIGHT)
    before = {route.flow: route.path for route in made.routes("j")}
    change = made.set_rates({"leaf0>spine1": 0.1})
    assert on(made, "leaf0>spine1") == 0
    assert change.moved == 2
    after = {route.flow: route.path for route in made.routes("j")}
    assert all(after[flow] == path for flow, path in before.items() if path[1] != "spine1")
    assert made.plan().method == "linear program"
    change = made.set_rates({})
    assert (change.max_load, change.bound) == (2, 2)
    assert made.plan().method == "edge colouring"
    assert on(made, "leaf0>spine1") == 2


def test_a_link_at_half_its_rate_keeps_its_flow_where_no_other_has_room():
    made = planner([(n, n + 8) for n in range(4)])
    assert made.set_rates({"leaf0>spine2": 0.6}).moved == 0


def test_slow_and_down_at_once():
    made = planner(EIGHT)
    made.set_rates({"leaf0>spine1": 0.1})
    made.set_down(["leaf0>spine0"])
    assert on(made, "leaf0>spine0") == on(made, "leaf0>spine1") == 0
    made.set_down([])
    made.set_rates({})
    assert [on(made, f"leaf0>spine{n}") for n in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "rates", [{"leaf0>nowhere": 0.5}, {"leaf0>spine1": 0.0}, {"leaf0>spine1": 1.5}, {"spine1": 0.5}]
)
def test_rates_that_are_none_change_nothing(rates: dict[str, float]):
    made = planner(EIGHT)
    version = made.version
    with pytest.raises(TrafficError):
        made.set_rates(rates)
    assert made.version == version and made.network.rates == {}


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_slowed_down_the_plan_is_exact_again_when_it_recovered(data: st.DataObject):
    pairs = st.tuples(st.integers(0, 31), st.integers(0, 31)).filter(lambda pair: pair[0] // 8 != pair[1] // 8)
    made = planner(data.draw(st.lists(pairs, min_size=1, max_size=40)))
    links = [f"leaf{a}>spine{s}" for a in range(4) for s in range(4)]
    for _ in range(data.draw(st.integers(1, 4))):
        rates = data.draw(st.dictionaries(st.sampled_from(links), st.floats(0.05, 0.95), max_size=4))
        down = data.draw(st.lists(st.sampled_from(links), max_size=1))
        made.set_down(down)
        change = made.set_rates(rates)
        assert change.max_load >= change.bound - 1e-6
        assert all(made.network.alive(a, b) for r in made.routes("j") for a, b in zip(r.path, r.path[1:], strict=False))
    made.set_down([])
    change = made.set_rates({})
    assert change.max_load == change.bound == math.ceil(change.bound)
    assert not change.stranded
