"""From layouts and recorder records to edges and flows, and what is worth a plan."""

from __future__ import annotations

import math

import pytest

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, DeclaredCollective, Demand, JobLayout, Seat
from keepstep.records.ring import GroupState, OpSlot, PeerSlot, Ring, RingHeader, SlotStatus
from keepstep.records.topology import ClosShape
from keepstep.traffic.advice import Policy, worth_planning
from keepstep.traffic.clos import clos
from keepstep.traffic.declared import demand_of, groups_of
from keepstep.traffic.edges import edges_of
from keepstep.traffic.flows import flows_of
from keepstep.traffic.nccl_settings import nccl_settings
from keepstep.traffic.network import Network
from keepstep.traffic.observed import observe
from keepstep.traffic.stages import StagePolicy, admitted

SEATS = {rank: Seat(rank, f"h{rank // 2}", rank % 2, 2) for rank in range(8)}


def edges(operation, ranks, **fields):
    use = CollectiveUse("u", operation, ranks, 8e6, **fields)
    return {(a, b): nbytes for a, b, nbytes in edges_of(use, SEATS)}


def test_a_ring_over_four_hosts_with_two_channels():
    found = edges("all_reduce", tuple(range(8)))
    assert set(found) == {(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 0), (7, 1)}
    assert set(found.values()) == {2 * 7 / 8 * 8e6 / 2}


def test_reduce_scatter_and_all_gather_send_half():
    for operation in ("reduce_scatter", "all_gather"):
        assert set(edges(operation, (0, 2, 4)).values()) == {2 / 3 * 8e6}


def test_inside_a_host_nothing_is_sent():
    assert edges("all_reduce", (0, 1)) == {}


def test_a_tree_goes_up_and_down():
    found = edges("all_reduce", (0, 2, 4, 6), algorithm="tree")
    assert set(found) == {(2, 0), (0, 2), (4, 0), (0, 4), (6, 2), (2, 6)}
    assert set(edges("broadcast", (0, 2, 4))) == {(0, 2), (0, 4)}
    assert set(edges("reduce", (0, 2, 4))) == {(2, 0), (4, 0)}


def test_all_to_all_pairs():
    found = edges("all_to_all", (0, 1, 2, 3))
    assert set(found) == {(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)}
    assert set(found.values()) == {2e6}


def test_sends_are_pairs():
    assert edges("send", (0, 2, 2, 4), calls=3) == {(0, 2): 24e6, (2, 4): 24e6}
    with pytest.raises(TrafficError, match="pairs"):
        edges("send", (0, 2, 4))


def test_measured_bytes_replace_the_formula():
    assert edges("all_reduce", (0, 2), measured_bytes=((0, 2, 5.0), (0, 1, 9.0))) == {(0, 2): 5.0}


def layout(**changes) -> JobLayout:
    fields = {"job": "j", "hosts": ("h0", "h1", "h2", "h3"), "collectives": (), "ranks_per_host": 2}
    return JobLayout(**fields | changes)


def test_groups_of_a_layout():
    """2 stages of 2 replicas of 2 tensor ranks: Megatron's order, tensor fastest, then data, then pipeline."""
    groups = groups_of(layout(tp=2, pp=2, dp=2, ep=2))
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["dp"] == groups["ep"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["pp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_pipeline_edges_and_the_way_back():
    uses = tuple(DeclaredCollective("pp", "send", 1e6, 4, back=back) for back in (False, True))
    demand = demand_of(layout(pp=4, collectives=uses))
    assert [use.ranks for use in demand.uses[:1]] == [(0, 2, 2, 4, 4, 6)]
    assert demand.uses[-1].ranks == (7, 5, 5, 3, 3, 1)


def test_a_collective_of_groups_of_one_rank_is_there_with_a_reason():
    sends = DeclaredCollective("pp", "send", 1e6)
    demand = demand_of(layout(collectives=(sends, DeclaredCollective("dp", "all_reduce", 1e9))))
    assert [use.name for use in demand.uses] == ["pp0.send.0", "dp0.all_reduce.1"]
    advice = worth_planning(demand, star()).advice[0]
    assert (advice.plan, advice.reason) == (False, "spread locally: its groups have one rank each, which sends nothing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, "not 8 ranks"),
        ({"tp": 2, "dp": 4, "ep": 3}, "does not divide"),
        ({"pp": 0}, "at least 1"),
        ({"hosts": ("h0", "h0")}, "lists host 'h0' twice"),
        ({"collectives": (DeclaredCollective("dp", "all_reduce", -1.0),)}, "negative"),
        ({"collectives": (DeclaredCollective("dp", "all_reduce", math.nan),)}, "finite"),
        ({"collectives": (DeclaredCollective("dp", "all_reduce", 1.0, calls=math.inf),)}, "finite"),
        ({"step_s": 0.1, "collectives": (DeclaredCollective("dp", "all_reduce", 1.0, 1.0, 5.0, 9.0),)}, "ends at 9 s"),
        ({"step_s": math.nan}, "steps of nan s"),
        ({"step_s": -1.0}, "steps of -1 s"),
        ({"ranks_per_host": 250_001}, "1000004 ranks, more than 1000000"),
        ({"collectives": (DeclaredCollective("dp", "all_reduce", 1e308, calls=1e9),)}, "more than 1e.30 bytes"),
    ],
)
def test_a_layout_that_does_not_add_up(changes, words):
    with pytest.raises(TrafficError, match=words):
        demand_of(layout(**changes))


def test_ranks_use_the_nic_of_their_rail():
    network = Network(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2, rails=2, separate_rails=True)))
    demand = demand_of(layout(collectives=(DeclaredCollective("world", "all_reduce", 1e6),)))
    flows = flows_of(demand, network)
    assert {(network.ports[f.source].rail, network.ports[f.destination].rail) for f in flows} == {(0, 0), (1, 1)}


def test_where_rails_are_apart_the_receivers_rail_is_used():
    network = Network(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2, rails=2, separate_rails=True)))
    demand = Demand("j", (Seat(0, "h0", 0, 2), Seat(3, "h2", 1, 2)), (CollectiveUse("s", "send", (0, 3), 1.0),))
    (flow,) = flows_of(demand, network)
    assert (flow.source, flow.destination) == ("h0/nic1/0", "h2/nic1/0")


def header(rank: int) -> RingHeader:
    group = GroupState("dp", 77, 0, 2, rank, 0, 0, 0, 0)
    return RingHeader(64, 0, 0, 0, 0, 1, rank, 0, 0, 5, f"m{rank}", (group,))


def recorded(rank: int, *, steps: int = 6, kind: int = 1, grow: int = 0) -> Ring:
    """A rank that sends 1000 bytes (and `grow` more each step) to the other in every step of 10 ms."""
    operations = []
    for step in range(steps):
        begin = 10_000_000 * step
        sent = 1000 + grow * step
        peer = PeerSlot(0, step, 1 - rank, 1, sent, sent, 0, 100, 200_000, 300_000)
        times = (begin, begin + 2_000_000, begin + 3_000_000)
        operations.append(
            OpSlot(step, kind, 2, 0, 0, SlotStatus.DONE, 77, 0, step, step, 250, 1000, *times, rank, 0, (peer,))
        )
    return Ring(header(rank), tuple(operations), 0, 0)


def test_the_demand_of_a_recorded_run():
    seats = [Seat(0, "h0"), Seat(1, "h2")]
    found = observe("j", {0: recorded(0), 1: recorded(1)}, seats=seats)
    (use,) = found.demand.uses
    assert found.steps == 4
    assert (use.name, use.operation, use.calls) == ("dp.all_reduce", "all_reduce", 1.0)
    assert use.measured_bytes == ((0, 1, 1000.0), (1, 0, 1000.0))
    assert (use.start_s, use.end_s) == pytest.approx((0.002, 0.003))
    assert found.demand.step_s == pytest.approx(0.010)
    assert found.measured[0].total_s == pytest.approx(0.001)
    assert found.measured[0].wait_s == pytest.approx(0.0003001)


def test_an_all_to_all_that_varies_depends_on_the_data():
    seats = [Seat(0, "h0"), Seat(1, "h2")]
    even = observe("j", {0: recorded(0, kind=6), 1: recorded(1, kind=6)}, seats=seats)
    odd = observe("j", {0: recorded(0, kind=6, grow=300), 1: recorded(1, kind=6)}, seats=seats)
    assert not even.demand.uses[0].data_dependent
    assert odd.demand.uses[0].data_dependent


def test_records_that_say_nothing():
    with pytest.raises(TrafficError, match="no step"):
        observe("j", {0: recorded(0, steps=2), 1: recorded(1)}, seats=[Seat(0, "h0"), Seat(1, "h2")])
    with pytest.raises(TrafficError, match="rank 1, which has no seat"):
        observe("j", {0: recorded(0), 1: recorded(1)}, seats=[Seat(0, "h0")])


def star() -> Network:
    return Network(clos(ClosShape(hosts=16, hosts_per_leaf=8, spines=8, port_gbps=400.0)))


HOSTS = ("h0", "h8", "h1", "h9", "h2", "h10", "h3", "h11", "h0")


def asked(use: CollectiveUse, step_s: float = 0.1) -> Demand:
    return Demand("j", tuple(Seat(rank, host) for rank, host in enumerate(HOSTS)), (use,), step_s)


@pytest.mark.parametrize(
    ("use", "others", "plan", "words"),
    [
        (CollectiveUse("u", "all_reduce", tuple(range(8)), 1e9), {}, True, "4 flows on 8 uplinks would cost"),
        (CollectiveUse("u", "all_reduce", tuple(range(8)), 1e5), {}, False, "below 200 us"),
        (CollectiveUse("u", "all_to_all", tuple(range(8)), 1e9, data_dependent=True), {}, False, "depends on the data"),
        (CollectiveUse("u", "all_reduce", (0, 2, 4), 1e9), {}, False, "inside one leaf"),
        (CollectiveUse("u", "all_reduce", (0, 1), 1e9), {}, False, "1 flow on 8 uplinks"),
        (CollectiveUse("u", "all_reduce", (0, 1), 1e9), {"leaf0": 7}, True, "8 flows on 8 uplinks"),
        (CollectiveUse("u", "all_reduce", (0,), 1e9), {}, False, "one rank"),
        (CollectiveUse("u", "all_reduce", (0, 8), 1e9), {}, False, "inside a host"),
    ],
)
def test_when_to_plan(use, others, plan, words):
    (advice,) = worth_planning(asked(use), star(), others=others).advice
    assert (advice.plan, words in advice.reason) == (plan, True), advice
    assert advice.inputs or not advice.plan


def test_parts_of_an_edge_count_as_flows_and_take_as_long_together():
    use = CollectiveUse("u", "all_reduce", (0, 1), 1e9)
    (whole,), (parted,) = (worth_planning(asked(use), star(), parts=parts).advice for parts in (1, 4))
    assert (whole.plan, parted.plan, "4 flows on 8 uplinks" in parted.reason) == (False, True, True)
    assert parted.inputs["transfer_s"] == pytest.approx(whole.inputs["transfer_s"])


def test_collectives_that_overlap_in_time_count_together():
    """Four sends over one leaf's uplinks, each of its own time; a fifth begins when all have ended."""
    sends = [
        CollectiveUse(f"s{n}", "send", (2 * n, 2 * n + 1), 1e9, 1.0, start, start + 0.05)
        for n, start in enumerate((0.0, 0.01, 0.02, 0.03))
    ]
    last = CollectiveUse("last", "send", (0, 1), 1e9, 1.0, 0.09, 0.1)
    demand = Demand("j", tuple(Seat(rank, host) for rank, host in enumerate(HOSTS[:8])), (*sends, last), 0.1)
    worth = worth_planning(demand, star())
    assert [one.inputs["flows_leaving_leaf"] for one in worth.advice] == [4, 4, 4, 4, 1]
    assert [one.plan for one in worth.advice] == [True, True, True, True, False]
    assert worth.crossing == {"leaf0": 4}


def test_a_leaf_without_uplinks_is_named():
    network = star()
    network.set_down(["leaf1"])
    with pytest.raises(TrafficError, match="'leaf[01]', which has no uplink left"):
        worth_planning(asked(CollectiveUse("u", "all_reduce", (0, 1), 1e9)), network)


def test_little_transfer_in_a_long_step_is_not_worth_it():
    use = CollectiveUse("u", "all_reduce", tuple(range(8)), 1e8)
    assert not worth_planning(asked(use, step_s=100.0), star()).flows
    assert worth_planning(asked(use, step_s=100.0), star(), policy=Policy(min_gain=1e-6)).flows


@pytest.mark.parametrize(
    ("stage", "priority", "ranks", "known", "expected"),
    [
        ("advise", 0, 100, True, False),
        ("low_priority", 0, 100, True, True),
        ("low_priority", 1, 100, True, False),
        ("large_known", 1, 100, True, True),
        ("large_known", 1, 10, True, False),
        ("large_known", 1, 100, False, False),
        ("large_known", 0, 10, False, True),
    ],
)
def test_stages(stage, priority, ranks, known, expected):
    demand = Demand("j", tuple(Seat(rank, "h0") for rank in range(ranks)), (), 0.0, priority, known)
    admits, reason = admitted(demand, StagePolicy(stage))
    assert (admits, bool(reason)) == (expected, True)


def test_what_nccl_can_be_told():
    network = Network(clos(ClosShape(hosts=4, hosts_per_leaf=2, spines=2, rails=2, sides=2, separate_rails=True)))
    found = nccl_settings("j", ["h0", "h2"], network=network, routes=(), traffic_class=106)
    assert found.environment["NCCL_IB_HCA"] == "=nic0:1,nic0:2,nic1:1,nic1:2"
    assert found.environment["NCCL_CROSS_NIC"] == "0"
    assert found.environment["NCCL_IB_TC"] == "106"
    assert "not run here" in found.text()
    assert "source port" in found.text()
    with pytest.raises(TrafficError, match="traffic class"):
        nccl_settings("j", ["h0"], network=network, routes=(), traffic_class=300)
