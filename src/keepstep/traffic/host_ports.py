"""The NICs inside a host, known from one file, put into a network known from another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.errors import TrafficError
from keepstep.records.topology import Port, Topology

__all__ = ["with_host_nics"]


def with_host_nics(topology: Topology, nics: Sequence[Port]) -> Topology:
    """`topology` with the NIC ports `nics` in every host: names, speeds, rails and sides from there, leaves from here.

    A host with one port has all its NICs on that leaf; a host with several must have as many NICs as `nics`. Raises
    TrafficError where the numbers do not fit.
    """
    rails = sorted({port.rail for port in nics})
    if not rails:
        raise TrafficError("the host's file names no NIC")
    hosts: dict[str, list[Port]] = {}
    for port in topology.ports:
        hosts.setdefault(port.host, []).append(port)
    ports: list[Port] = []
    for host, old in hosts.items():
        leaf_of = {(port.rail, port.side): port.leaf for port in old}
        if len(old) > 1 and len({port.rail for port in old}) != len(rails):
            raise TrafficError(f"host {host!r} has {len(old)} ports in the network, {len(rails)} NICs in its own file")
        for port in nics:
            leaf = leaf_of.get((port.rail, port.side)) or leaf_of.get((port.rail, 0)) or old[0].leaf
            ports.append(msgspec.structs.replace(port, host=host, leaf=leaf, domains=old[0].domains))
    note = f"NICs of every host as in one host's file: {len(rails)} NICs, {len(nics)} ports"
    return msgspec.structs.replace(topology, ports=tuple(ports), notes=(*topology.notes, note))
