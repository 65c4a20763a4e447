"""What is wrong with a topology, in plain words, before anything is planned on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from keepstep.errors import TrafficError
from keepstep.records.topology import Topology
from keepstep.traffic.network import Network

__all__ = ["checked", "problems"]


def problems(topology: Topology) -> tuple[str, ...]:
    """All that keeps `topology` from being planned on; empty if nothing does."""
    found = [*_names(topology), *_capacities(topology)]
    if found:
        return tuple(found)
    return (*_tiers(topology), *_spines(topology), *_apart(topology))


def checked(topology: Topology, where: str = "") -> Topology:
    """`topology`, if nothing is wrong with it. Raises TrafficError with the first problem and the number of others."""
    found = problems(topology)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise TrafficError(f"{found[0]}{more}", where=where or topology.name, remedy="correct the topology")
    return topology


def _names(topology: Topology) -> Iterator[str]:
    switches = Counter(switch.name for switch in topology.switches)
    for kind, names in (
        ("switch", switches),
        ("port", Counter(port.name for port in topology.ports)),
        ("cable", Counter(f"{cable.lower} to {cable.upper}" for cable in topology.cables)),
    ):
        yield from (f"{kind} {name!r} is listed {count} times" for name, count in names.items() if count > 1)
    for cable in topology.cables:
        for end in (cable.lower, cable.upper):
            if end not in switches:
                yield f"a cable leads to {end!r}, which is not a switch of the topology"
    for port in topology.ports:
        if port.leaf and port.leaf not in switches:
            yield f"host {port.host!r} is plugged into {port.leaf!r}, which is not a switch of the topology"


def _capacities(topology: Topology) -> Iterator[str]:
    for port in topology.ports:
        if not (math.isfinite(port.gbps) and port.gbps > 0):
            yield f"port {port.name!r} has a capacity of {port.gbps:g} Gbit/s"
    for cable in topology.cables:
        name = f"{cable.lower} to {cable.upper}"
        if not (math.isfinite(cable.gbps) and cable.gbps > 0):
            yield f"the cable {name} has a capacity of {cable.gbps:g} Gbit/s"
        if cable.count < 1:
            yield f"there are {cable.count} cables {name}"


def _tiers(topology: Topology) -> Iterator[str]:
    tier = {switch.name: switch.tier for switch in topology.switches}
    for cable in topology.cables:
        low, high = tier[cable.lower], tier[cable.upper]
        if low == high:
            yield f"{cable.lower!r} and {cable.upper!r} are both of tier {low} and joined: a loop beside the tree"
        elif high != low + 1:
            yield f"{cable.upper!r} (tier {high}) is not one tier above {cable.lower!r} (tier {low})"
    for port in topology.ports:
        if port.leaf and tier[port.leaf] != 1:
            yield f"host {port.host!r} is plugged into {port.leaf!r} of tier {tier[port.leaf]}, not into a leaf"


def _spines(topology: Topology) -> Iterator[str]:
    if not topology.ports:
        yield "no host has a NIC port"
    elif all(not port.leaf for port in topology.ports):
        yield "no switches: it describes hosts only, not the network between them"
    leaves = dict.fromkeys(port.leaf for port in topology.ports if port.leaf)
    if len(leaves) > 1 and not any(switch.tier > 1 for switch in topology.switches):
        yield f"0 spines above {len(leaves)} leaves: nothing joins them"


def _apart(topology: Topology) -> Iterator[str]:
    """Rails and sides may be networks of their own; one rail of one side may not fall apart."""
    if not any(switch.tier > 1 for switch in topology.switches):
        return
    part_of = {leaf: number for number, part in enumerate(Network(topology).parts) for leaf in part}
    parts: dict[tuple[int, int], dict[int, str]] = {}
    for port in topology.ports:
        if port.leaf in part_of:
            parts.setdefault((port.rail, port.side), {}).setdefault(part_of[port.leaf], port.leaf)
    for (rail, side), leaves in parts.items():
        if len(leaves) > 1:
            names = ", ".join(repr(leaf) for leaf in list(leaves.values())[:3])
            yield f"rail {rail} side {side} falls into {len(leaves)} parts with no way between them: {names}"
