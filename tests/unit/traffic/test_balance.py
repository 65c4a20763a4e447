"""Plans on irregular networks: near the linear program's bound, and only what is affected moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.records.topology import Cable, ClosShape, Switch, Topology
from keepstep.traffic.balance import Balance
from keepstep.traffic.clos import clos
from keepstep.traffic.network import MAX_PATHS, Network


def uneven() -> Network:
    """Two leaves, one spine of 400 and one of 100 Gbit/s."""
    switches = (Switch("a", 1), Switch("b", 1), Switch("wide", 2), Switch("thin", 2))
    cables = tuple(
        Cable(leaf, spine, 400.0 if spine == "wide" else 100.0) for leaf in "ab" for spine in ("wide", "thin")
    )
    return Network(Topology("uneven", switches, (), cables))


def test_unequal_spines_carry_unequal_shares():
    balance = Balance(uneven(), reference_gbps=400.0)
    balance.fill(dict.fromkeys(range(10), ("a", "b", 1.0)))
    assert balance.bound == pytest.approx(8.0)
    assert balance.max_load == pytest.approx(8.0)
    assert sum("thin" in path for path, _ in balance.way_of.values()) == 2


def test_three_tiers_meet_the_bound():
    network = Network(clos(ClosShape(hosts=16, hosts_per_leaf=4, spines=2, pods=2, cores=2)))
    balance = Balance(network, reference_gbps=400.0)
    pairs = [("leaf0", "leaf2"), ("leaf0", "leaf1"), ("leaf1", "leaf3"), ("leaf3", "leaf0")]
    balance.fill({flow: (*pairs[flow % 4], 1.0) for flow in range(16)})
    assert balance.bound == balance.max_load == 4.0


def test_a_pod_with_few_cores_sets_the_bound():
    """8 flows of two leaves leave a pod over 2 spines with one core each: 4 on each link up."""
    network = Network(clos(ClosShape(hosts=16, hosts_per_leaf=4, spines=2, pods=2, cores=2)))
    balance = Balance(network, reference_gbps=400.0)
    balance.fill({flow: (f"leaf{flow % 2}", f"leaf{2 + flow % 2}", 1.0) for flow in range(8)})
    assert balance.bound == balance.max_load == 4.0


def test_whole_flows_on_a_thin_link_count_more():
    """Three flows on cables of 400 and 100: 2 and 1 would fill the thin one to 4, so all go on the wide one."""
    balance = Balance(uneven(), reference_gbps=400.0)
    balance.fill(dict.fromkeys(range(3), ("a", "b", 1.0)))
    assert balance.bound == balance.max_load == 3.0


def test_a_dead_link_moves_its_own_flows():
    network = uneven()
    balance = Balance(network, reference_gbps=400.0)
    balance.fill(dict.fromkeys(range(10), ("a", "b", 1.0)))
    thin = {flow for flow, (path, _) in balance.way_of.items() if "thin" in path}
    balance.settle()
    network.set_down(["thin"])
    assert balance.reroute() == []
    assert set(balance.settle()) == thin
    assert balance.bound == balance.max_load == pytest.approx(10.0)
    network.set_down(["thin", "wide"])
    assert len(balance.reroute()) == 10


def tall(pods: dict[str, tuple[str, ...]], *, spines: int, cores: int, cables: int = 1) -> Network:
    """Pods with their leaves, `spines` spines in each, all of them under all `cores`, by `cables` cables each."""
    above = {pod: [f"{pod}.{number}" for number in range(spines)] for pod in pods}
    tops = [f"core{number}" for number in range(cores)]
    switches = [Switch(leaf, 1) for leaves in pods.values() for leaf in leaves]
    switches += [Switch(name, 2) for names in above.values() for name in names] + [Switch(name, 3) for name in tops]
    found = [Cable(leaf, spine, 400.0) for pod, leaves in pods.items() for leaf in leaves for spine in above[pod]]
    found += [Cable(spine, top, 400.0, cables) for names in above.values() for spine in names for top in tops]
    return Network(Topology("tall", tuple(switches), (), tuple(found)))


def test_parallel_cables_above_single_ones_are_used_too():
    network = tall({"p": ("a", "b"), "q": ("c", "d")}, spines=1, cores=1, cables=2)
    balance = Balance(network, reference_gbps=400.0)
    balance.fill({0: ("a", "c", 1.0), 1: ("b", "d", 1.0)})
    assert balance.max_load == balance.bound == 1.0
    assert {hop: load for hop, load in balance.loads().items() if hop[1] == "core0"} == {
        ("p.0", "core0", 0): 1.0,
        ("p.0", "core0", 1): 1.0,
    }


def test_it_is_the_fullest_of_parallel_cables_that_counts():
    network = Network(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=1, cables=2)))
    balance = Balance(network, reference_gbps=400.0)
    balance.fill({0: ("leaf0", "leaf1", 3.0), 1: ("leaf0", "leaf1", 1.0)})
    assert balance.max_load == balance.bound == pytest.approx(3.0)


def test_a_way_round_what_was_down_is_left_when_it_is_back():
    """Two leaves of a pod that no spine joins any more meet over a core."""
    network = tall({"p": ("a", "b"), "q": ("c",)}, spines=2, cores=1)
    balance = Balance(network, reference_gbps=400.0)
    balance.fill({0: ("a", "b", 1.0)})
    network.set_down(["a>p.1", "p.0>b"])
    assert balance.reroute() == []
    assert balance.way_of[0][0] == ("a", "p.0", "core0", "p.1", "b")
    network.set_down([])
    assert balance.reroute() == []
    assert balance.improve(1) == 0
    assert len(balance.way_of[0][0]) == 3


def test_of_more_ways_than_are_looked_at_every_link_has_its_share():
    network = tall({"p": ("a",), "q": ("b",)}, spines=17, cores=17)
    paths = network.paths("a", "b")
    assert len(set(paths)) == MAX_PATHS < 17**3
    for hop in (1, 2, 3):
        counts = Counter(path[hop] for path in paths)
        assert len(counts) == 17 and max(counts.values()) < 1.2 * min(counts.values())


def test_a_link_that_fails_moves_its_own_flows_alone_where_not_all_ways_are_looked_at():
    network = tall({"p": ("a",), "q": ("b",)}, spines=17, cores=17)
    balance = Balance(network, reference_gbps=400.0)
    balance.fill(dict.fromkeys(range(17), ("a", "b", 1.0)))
    assert balance.bound == balance.max_load == 1.0
    balance.settle()
    lost = balance.way_of[0][0][:2]
    own = {flow for flow, (path, _) in balance.way_of.items() if path[:2] == lost}
    network.set_down([">".join(lost)])
    assert balance.reroute() == []
    assert set(balance.settle()) == own


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1.0, 2.0, 5.0])), max_size=25))
@settings(max_examples=60, deadline=None)
def test_no_plan_is_below_the_bound_and_loads_add_up(flows):
    network = Network(clos(ClosShape(hosts=8, hosts_per_leaf=2, spines=3)))
    balance = Balance(network, reference_gbps=400.0)
    wanted = {n: (f"leaf{a}", f"leaf{b}", w) for n, (a, b, w) in enumerate(flows) if a != b}
    balance.fill(wanted)
    assert balance.max_load >= balance.bound - 1e-6
    assert sum(balance.loads().values()) == pytest.approx(2 * sum(weight for _, _, weight in wanted.values()))
    if wanted:
        heaviest = max(weight for _, _, weight in wanted.values())
        assert balance.max_load <= balance.bound + 2 * heaviest + 1e-6
    balance.remove(list(wanted))
    assert balance.max_load == pytest.approx(0.0)
