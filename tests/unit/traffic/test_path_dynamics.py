"""Paths that slow down and recover: shares of flows that follow, and do not swing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.records.demand import Flow
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.dynamics import DynamicsPolicy, PathShares, Speed
from keepstep.traffic.planner import Planner

PATHS = ("a", "b", "c", "d")


def speeds(**changes: float) -> dict[str, Speed]:
    return {path: Speed(value) for path, value in (dict.fromkeys(PATHS, 100.0) | changes).items()}


def looked(shares: PathShares, *, now: float = 0.0, **changes: float) -> tuple[str, ...]:
    """The paths whose share was lowered by enough looks to be sure."""
    return tuple(path for _ in range(3) for path in shares.step(speeds(**changes), now=now).lowered)


def test_a_slow_path_is_noticed_within_five_looks_and_one_slow_look_is_forgiven():
    shares = PathShares(PATHS)
    assert shares.step(speeds(c=30.0), now=0).lowered == ()
    assert shares.step(speeds(), now=0).lowered == ()
    verdicts = [shares.step(speeds(c=30.0), now=0) for _ in range(5)]
    assert [verdict.lowered for verdict in verdicts].index(("c",)) == 2
    assert verdicts[2].reasons == {"c": "30% of the others for 3 looks"}
    assert shares.lowered == {"c": 0.3}


def test_a_path_that_carried_nothing_at_first_is_no_measure():
    shares = PathShares(("a",))
    for speed in (0.0, 100.0, 100.0, 20.0):
        assert shares.step({"a": Speed(speed)}, now=0).lowered == ()
    assert [shares.step({"a": Speed(20.0)}, now=0).lowered for _ in range(2)] == [(), ("a",)]


def test_a_path_with_flows_gets_its_share_back_when_it_is_well():
    shares = PathShares(PATHS)
    looked(shares, b=50.0)
    assert shares.lowered == {"b": 0.5}
    looked(shares, b=20.0)
    assert shares.lowered == {"b": 0.2}
    raised = [shares.step(speeds(b=100.0), now=0).raised for _ in range(3)]
    assert raised == [(), (), ("b",)]
    assert shares.lowered == {}


def test_a_path_without_flows_is_tried_again_and_waits_longer_each_time_it_is_still_slow():
    shares = PathShares(PATHS, DynamicsPolicy(first_wait_s=10, longest_wait_s=30))
    now, waits = 0.0, []
    for _ in range(4):
        assert looked(shares, now=now, b=10.0) == ("b",)
        left = now
        while not shares.due(now).raised:
            now += 1
        waits.append(now - left)
        now += 3
    assert waits == [10, 20, 30, 30]


def test_a_path_that_was_well_for_long_starts_with_the_short_wait_again():
    shares = PathShares(PATHS, DynamicsPolicy(first_wait_s=10))
    looked(shares, now=0, b=10.0)
    assert shares.due(10).raised == ("b",)
    looked(shares, now=500, b=10.0)
    assert shares.due(509).raised == ()
    assert shares.due(510).raised == ("b",)


def test_all_equally_slow_is_nobodys_fault():
    shares = PathShares(PATHS)
    assert all(not shares.step(dict.fromkeys(PATHS, Speed(1.0)), now=0).lowered for _ in range(10))


def test_more_flows_on_a_path_do_not_make_it_slow_and_fewer_do_not_make_it_well():
    shares = PathShares(PATHS)
    assert all(not shares.step(speeds() | {"a": Speed(50.0, 2)}, now=0).lowered for _ in range(10))
    looked(shares, b=25.0)
    few = {path: Speed(100.0, 8) for path in PATHS} | {"b": Speed(100.0, 2)}  # a quarter of the flows, as fast each
    assert all(not shares.step(few, now=0).raised for _ in range(10))
    assert shares.lowered == {"b": 0.25}


def test_the_only_path_in_use_is_held_against_itself():
    shares = PathShares(PATHS)
    for _ in range(5):
        shares.step({"a": Speed(100.0)}, now=0)
    assert [shares.step({"a": Speed(10.0)}, now=0).lowered for _ in range(3)][-1] == ("a",)


@given(st.lists(st.lists(st.floats(85.0, 115.0), min_size=4, max_size=4), min_size=30, max_size=60))
@settings(max_examples=50, deadline=None)
def test_noise_moves_nothing(steps):
    """Speeds within 15 % of each other: every path keeps its share."""
    shares = PathShares(PATHS)
    for step in steps:
        assert not shares.step({path: Speed(value) for path, value in zip(PATHS, step, strict=True)}, now=0).lowered


@pytest.mark.parametrize("together", [True, False], ids=["flows at once", "flows in turns"])
@pytest.mark.parametrize(("flows", "share"), [(4, 0.1), (8, 0.3), (16, 0.5), (64, 0.25), (64, 0.6), (6, 0.5)])
def test_flows_follow_the_speed_of_a_path_and_settle(flows: int, share: float, together: bool):
    """Closed loop with the planner: one of four uplinks gives a share of its rate from look 20 on, and all from 200.

    Where fewer flows on it leave open whether it recovered, it is tried now and then: there and back."""
    planner = Planner(clos(ClosShape(hosts=2 * flows, hosts_per_leaf=flows, spines=4)))
    ports = [port.name for port in planner.network.topology.ports]
    planner.arrive("j", [Flow("j", str(n), ports[n], ports[n + flows]) for n in range(flows)])
    shares = PathShares([f"spine{n}" for n in range(4)])
    noise, moves, carried = random.Random(flows), [], []
    for look in range(520):
        rate = dict.fromkeys(range(4), 1e9) | ({1: share * 1e9} if 20 <= look < 200 else {})
        loads = [sum(route.path[1] == f"spine{n}" for route in planner.routes("j")) for n in range(4)]
        shares.due(look)
        found = {
            f"spine{n}": Speed(rate[n] / (loads[n] if together else 1) * noise.uniform(0.95, 1.05), loads[n])
            for n in range(4)
            if loads[n]
        }
        shares.step(found, now=look)
        slow = shares.lowered
        rates = {link: s for n, s in slow.items() for link in (f"leaf0>{n}", f"{n}>leaf1")}
        moves.append(planner.set_rates(rates).moved if rates != planner.network.rates else 0)
        carried.append(loads[1])
    even = flows // 4
    assert sum(moves[:20]) == 0
    assert carried[45] / even <= max(share + 0.3, 0.5) or flows <= 6, "fewer flows, as the path gives less"
    assert sum(moves[20:50]) <= even + 2
    assert sum(moves[60:200]) <= 3 * 2 * (even + 2), "three trials at most: after 30, 60 and 120 looks"
    assert carried[-1] in (even, even + (flows % 4 > 0)), "all is back, with nothing left in the way"
    assert sum(moves[460:]) == 0
