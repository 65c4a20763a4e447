"""Regular Clos networks, for benchmarks, examples and the `clos:` form of a topology file."""

from __future__ import annotations

from keepstep.errors import TrafficError
from keepstep.records.topology import Cable, ClosShape, Port, Switch, Topology

__all__ = ["clos"]

_MOST = 4_000_000


def clos(shape: ClosShape) -> Topology:
    """The topology of `shape`. Raises TrafficError for counts below 1, and pods that do not divide the groups.

    Also for more than two sides, or four million ports or cables.
    """
    counts = (shape.hosts, shape.hosts_per_leaf, shape.rails, shape.sides, shape.cables, shape.pods)
    if min(counts) < 1 or shape.spines < 0 or shape.cores < 0:
        raise TrafficError("a Clos needs at least 1 host, host per leaf, rail, side, cable and pod, and 0 spines")
    if shape.sides > 2:
        raise TrafficError(f"{shape.sides} sides; a NIC has one port or two")
    groups = -(-shape.hosts // shape.hosts_per_leaf)
    if groups % shape.pods:
        raise TrafficError(f"{shape.pods} pods do not divide {groups} groups of hosts")
    seats = shape.rails * shape.sides
    if max(shape.hosts * seats, groups * seats * shape.spines, shape.spines * shape.pods * shape.cores) > _MOST:
        raise TrafficError(f"a Clos of more than {_MOST} ports or cables")
    leaves, ports = _below(shape)
    spines, cables = _above(shape, groups)
    return Topology(shape.name, (*leaves, *spines), ports, cables, source="clos")


def _leaf(group: int, rail: int, *, side: int, shape: ClosShape) -> str:
    name = f"leaf{group}"
    if shape.rails > 1:
        name += f"r{rail}"
    return name + (f"s{side}" if shape.sides > 1 else "")


def _below(shape: ClosShape) -> tuple[tuple[Switch, ...], tuple[Port, ...]]:
    groups = -(-shape.hosts // shape.hosts_per_leaf)
    seats = [(rail, side) for rail in range(shape.rails) for side in range(shape.sides)]
    names = {
        (group, rail, side): _leaf(group, rail, side=side, shape=shape)
        for group in range(groups)
        for rail, side in seats
    }
    leaves = tuple(Switch(name, 1, (f"group{key[0]}",)) for key, name in names.items())
    ports = tuple(
        Port(f"h{host}", f"nic{rail}", names[host // shape.hosts_per_leaf, rail, side], shape.port_gbps, rail, side)
        for host in range(shape.hosts)
        for rail, side in seats
    )
    return leaves, ports


def _above(shape: ClosShape, groups: int) -> tuple[tuple[Switch, ...], tuple[Cable, ...]]:
    switches: dict[str, Switch] = {}
    cables: list[Cable] = []
    for group in range(groups):
        for rail in range(shape.rails):
            for side in range(shape.sides):
                for number in range(shape.spines):
                    name = _spine(number, rail, side=side, pod=group * shape.pods // groups, shape=shape)
                    switches[name] = Switch(name, 2)
                    lower = _leaf(group, rail, side=side, shape=shape)
                    cables.append(Cable(lower, name, shape.uplink_gbps, shape.cables))
    if shape.pods > 1:
        for number in range(shape.cores):
            switches[f"core{number}"] = Switch(f"core{number}", 3)
        spines = [name for name, switch in switches.items() if switch.tier == 2]
        cables += [
            Cable(spine, f"core{core}", shape.uplink_gbps)
            for place, spine in enumerate(spines)
            for core in range(place % shape.spines, shape.cores, shape.spines)
        ]
    return tuple(switches.values()), tuple(cables)


def _spine(number: int, rail: int, *, side: int, pod: int, shape: ClosShape) -> str:
    name = f"spine{number}"
    if shape.separate_rails and shape.rails > 1:
        name += f"r{rail}"
    if shape.sides > 1:
        name += f"s{side}"
    return name + (f"p{pod}" if shape.pods > 1 else "")
