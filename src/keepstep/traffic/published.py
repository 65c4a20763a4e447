"""The figures of C4P (HPCA 2025), put out by the model from the inputs of its test: modelled here, not measured.

The published figures are second-hand (see the comparison in docs/traffic.md); they are shown beside ours, nothing
depends on them. The test: 16 hosts, 8 NICs of 2 x 200 Gbit/s each, 8 concurrent all-reduce jobs of 2 hosts, bus
bandwidth 360 Gbit/s a NIC at best (90 % of the wire), leaves with 8 uplinks of 400 Gbit/s at 1:1.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from keepstep.records.demand import Flow
from keepstep.records.topology import Cable, ClosShape, Port, Switch, Topology
from keepstep.traffic.clos import clos
from keepstep.traffic.hashing import hashed_ports, hashed_routes
from keepstep.traffic.model import flow_rates
from keepstep.traffic.network import Network
from keepstep.traffic.planner import Planner

__all__ = ["PublishedFigure", "c4p_figures"]

_EFFICIENCY = 0.9
_JOBS = 8
_SPINES = 8


class PublishedFigure(msgspec.Struct, frozen=True):
    """One figure in Gbit/s: (lowest, median, highest) as modelled, and what was published (weak: second-hand)."""

    name: str
    modelled: tuple[float, float, float]
    published: str


def c4p_figures(seeds: Sequence[int], queue_pairs: int = 16) -> tuple[PublishedFigure, ...]:
    """The figures; ranges are over jobs and `seeds` of the hash. Each NIC pair has `queue_pairs` connections."""
    network = _network()
    hashed = [rate for seed in seeds for rate in _hashed(network, 1, seed=seed)]
    planned = _planned(network, queue_pairs)
    broken = _network()
    broken.set_down(_one_uplink())
    hashed_down = [rate for seed in seeds for rate in _hashed(broken, 1, seed=seed)]
    planned_down = _planned(broken, queue_pairs)
    ports = [rate for seed in seeds for rate in _two_ports(seed)]
    ideal = 7 / 8 * 360
    return (
        PublishedFigure("8 jobs, 1:1, hashed", _range(hashed), "171.93 to 263.27"),
        PublishedFigure("8 jobs, 1:1, planned", _range(planned), "353.86 to 360.57"),
        PublishedFigure("one of 8 uplinks down, hashed", _range(hashed_down), "185.76"),
        PublishedFigure("one of 8 uplinks down, planned, equal shares", _range(planned_down), "301.46"),
        PublishedFigure("one of 8 uplinks down, planned, shares by speed", (ideal, ideal, ideal), "ideal 315"),
        PublishedFigure("both ports of a NIC, hashed", _range(ports), "below 240"),
        PublishedFigure("both ports of a NIC, planned", _range(_balanced()), "about 360"),
    )


def _network() -> Network:
    shape = ClosShape(hosts=16, hosts_per_leaf=8, spines=_SPINES, port_gbps=400.0, uplink_gbps=400.0)
    return Network(clos(shape))


def _one_uplink() -> tuple[str, ...]:
    return ("leaf0>spine0", "spine0>leaf0")


def _flows(connections: int) -> list[Flow]:
    """Both directions of each job's ring between a host of one leaf and one of the other."""
    pairs = [pair for job in range(_JOBS) for pair in ((job, job, job + 8), (job, job + 8, job))]
    return [
        Flow(f"job{job}", "all_reduce", f"h{a}/nic0/0", f"h{b}/nic0/0", 1.0, part=part)
        for job, a, b in pairs
        for part in range(connections)
    ]


def _hashed(network: Network, connections: int, *, seed: int) -> Iterator[float]:
    flows = _flows(connections)
    routes = {route.flow: route for route in hashed_routes(flows, network, seed=seed)}
    return _of_jobs(flows, flow_rates(flows, routes, network=network, efficiency=_EFFICIENCY), connections=connections)


def _planned(network: Network, connections: int) -> list[float]:
    planner = Planner(network.topology, down=network.down)
    flows = _flows(connections)
    for job in range(_JOBS):
        planner.arrive(f"job{job}", [flow for flow in flows if flow.job == f"job{job}"])
    routes = {route.flow: route for route in planner.routes()}
    return list(
        _of_jobs(flows, flow_rates(flows, routes, network=network, efficiency=_EFFICIENCY), connections=connections)
    )


def _of_jobs(flows: Sequence[Flow], rates: dict[str, float], *, connections: int) -> Iterator[float]:
    """The bandwidth of each job: bytes are shared equally, so the slowest connection sets the pace of all."""
    for job in range(_JOBS):
        slowest = min(rates[flow.name] for flow in flows if flow.job == f"job{job}")
        yield connections * slowest


def _two_ports(seed: int) -> Iterator[float]:
    network = _bonded()
    flows = hashed_ports(_halves(), network, seed=seed)
    routes = {route.flow: route for route in hashed_routes(flows, network, seed=seed)}
    return _of_jobs(flows, flow_rates(flows, routes, network=network, efficiency=_EFFICIENCY), connections=2)


def _balanced() -> list[float]:
    network = _bonded()
    flows = _halves()
    planner = Planner(network.topology)
    for job in range(_JOBS):
        planner.arrive(f"job{job}", [flow for flow in flows if flow.job == f"job{job}"])
    routes = {route.flow: route for route in planner.routes()}
    return list(_of_jobs(flows, flow_rates(flows, routes, network=network, efficiency=_EFFICIENCY), connections=2))


def _bonded() -> Network:
    """Both leaves of every NIC reach the same 64 spines, so that uplinks are no limit and only the ports matter."""
    leaves = {(host // 8, side): f"leaf{host // 8}{'ab'[side]}" for host in range(16) for side in range(2)}
    spines = [f"spine{number}" for number in range(64)]
    switches = [Switch(name, 1) for name in leaves.values()] + [Switch(name, 2) for name in spines]
    ports = [
        Port(f"h{host}", "nic0", leaves[host // 8, side], 200.0, 0, side) for host in range(16) for side in range(2)
    ]
    cables = [Cable(leaf, spine, 400.0) for leaf in leaves.values() for spine in spines]
    return Network(Topology("bonded", tuple(switches), tuple(ports), tuple(cables)))


def _halves() -> list[Flow]:
    pairs = [pair for job in range(_JOBS) for pair in ((job, job, job + 8), (job, job + 8, job))]
    return [
        Flow(f"job{job}", "all_reduce", f"h{a}/nic0/{side}", f"h{b}/nic0/{side}", 1.0, part=side)
        for job, a, b in pairs
        for side in range(2)
    ]


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)
