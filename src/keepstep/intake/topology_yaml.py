"""Our own topology file in YAML: everything a planner can know of a network, or the measures of a regular Clos.

Names may be ranges, `leaf[0-3]`. A cable between ranges joins each lower to each upper. See docs/traffic.md.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from keepstep.errors import RecordError
from keepstep.intake.bounded_yaml import parse_yaml
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.topology_assumed import Assumed
from keepstep.records.topology import Cable, ClosShape, Port, Switch, Topology

__all__ = ["FORMAT", "looks_like_yaml_topology", "read_yaml_topology", "write_yaml_topology"]

FORMAT = 1
_KEY = "keepstep_topology"
_MOST_CABLES = 4_000_000
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _YamlPort(msgspec.Struct, forbid_unknown_fields=True):
    leaf: str
    nic: str = "nic0"
    gbps: float | None = None
    rail: int = 0
    side: int = 0


class _YamlHost(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    leaf: str = ""
    gbps: float | None = None
    ports: tuple[_YamlPort, ...] = ()
    domains: tuple[str, ...] = ()


class _YamlSwitch(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    tier: int
    domains: tuple[str, ...] = ()


class _YamlCable(msgspec.Struct, forbid_unknown_fields=True):
    lower: str
    upper: str
    gbps: float | None = None
    count: int = 1


class _YamlFile(msgspec.Struct, forbid_unknown_fields=True):
    keepstep_topology: int
    name: str = "topology"
    gbps: float | None = None
    switches: tuple[_YamlSwitch, ...] = ()
    hosts: tuple[_YamlHost, ...] = ()
    cables: tuple[_YamlCable, ...] = ()
    clos: ClosShape | None = None


def looks_like_yaml_topology(text: str) -> bool:
    """Whether the file says that it is one."""
    return any(line.startswith(_KEY) for line in text[:100_000].splitlines())


def read_yaml_topology(text: str, assumed: Assumed | None = None, *, where: str = "") -> Topology | ClosShape:
    """The topology in `text`, or the measures of a Clos. Raises RecordError with the place of the first mistake."""
    assumed = assumed or Assumed()
    try:
        file = msgspec.convert(parse_yaml(text, where=where), _YamlFile, strict=False)
    except msgspec.ValidationError as error:
        raise RecordError(f"not a topology: {error}", where=where, remedy="see docs/traffic.md") from error
    if file.keepstep_topology != FORMAT:
        raise RecordError(f"{_KEY} {file.keepstep_topology}; this keepstep reads {FORMAT}", where=where)
    if file.clos is not None:
        if file.switches or file.hosts or file.cables:
            raise RecordError("clos: and switches, hosts, cables exclude each other", where=where)
        return msgspec.structs.replace(file.clos, name=file.name)
    switches = tuple(Switch(name, one.tier, one.domains) for one in file.switches for name in expand_hosts(one.name))
    ports = tuple(port for host in file.hosts for port in _ports(host, _first(file.gbps, assumed.gbps)))
    cable_gbps = _first(file.gbps, assumed.cable_gbps)
    cables: list[Cable] = []
    for one in file.cables:
        lowers, uppers = expand_hosts(one.lower), expand_hosts(one.upper)
        if len(cables) + len(lowers) * len(uppers) > _MOST_CABLES:
            raise RecordError(f"more than {_MOST_CABLES} cables", where=where)
        cables += [Cable(a, b, _first(one.gbps, cable_gbps), one.count) for a in lowers for b in uppers]
    return Topology(file.name, switches, ports, tuple(cables), "keepstep YAML", _notes(file, assumed))


def write_yaml_topology(topology: Topology) -> str:
    """`topology` as a file that `read_yaml_topology` reads back to the same switches, ports and cables."""
    hosts: dict[str, dict[str, Any]] = {}
    for port in topology.ports:
        entry = hosts.setdefault(port.host, {"name": port.host, "ports": []})
        if port.domains:
            entry["domains"] = list(port.domains)
        entry["ports"].append(
            {"nic": port.nic, "leaf": port.leaf, "gbps": port.gbps, "rail": port.rail, "side": port.side}
        )
    switches = [
        {"name": one.name, "tier": one.tier} | ({"domains": list(one.domains)} if one.domains else {})
        for one in topology.switches
    ]
    cables = [{"lower": c.lower, "upper": c.upper, "gbps": c.gbps, "count": c.count} for c in topology.cables]
    body = {_KEY: FORMAT, "name": topology.name, "switches": switches, "hosts": list(hosts.values()), "cables": cables}
    notes = "".join(f"# {note}\n" for note in topology.notes)
    return notes + str(yaml.dump(body, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=200))


def _ports(host: _YamlHost, gbps: float) -> list[Port]:
    """All ports of the hosts that one entry stands for."""
    listed = host.ports or (_YamlPort(host.leaf, gbps=host.gbps),)
    return [
        Port(name, port.nic, port.leaf, _first(port.gbps, host.gbps, gbps), port.rail, port.side, host.domains)
        for name in expand_hosts(host.name)
        for port in listed
    ]


def _first(*values: float | None) -> float:
    """The first capacity that is given."""
    return next(value for value in values if value is not None)


def _notes(file: _YamlFile, assumed: Assumed) -> tuple[str, ...]:
    """What was assumed, where the file says nothing."""
    if file.gbps is not None:
        return ()
    silent = [port for host in file.hosts if host.gbps is None for port in host.ports or (_YamlPort(""),)]
    found = []
    if any(port.gbps is None for port in silent):
        found.append(f"{assumed.gbps:g} a port")
    if any(one.gbps is None for one in file.cables):
        found.append(f"{assumed.cable_gbps:g} a cable")
    return (f"where the file gives no capacity, in Gbit/s: {', '.join(found)} assumed",) if found else ()
