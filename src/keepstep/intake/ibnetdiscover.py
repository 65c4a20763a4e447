"""The text that ibnetdiscover writes (rdma-core, infiniband-diags): switches, channel adapters, cables, their speeds.

Hosts are channel adapters, named by the first word of their description. A switch with hosts is a leaf, one that joins
leaves a spine, and so on. Adapters inside switches (SHARP aggregation nodes) and routers are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from keepstep.errors import RecordError, TrafficError
from keepstep.records.topology import Cable, Port, Switch, Topology

__all__ = ["looks_like_ibnetdiscover", "read_ibnetdiscover"]

_NODE = re.compile(r'^(Switch|Ca|Rt|\?\?\?)\s+\d+\s+"([A-Z?])-([0-9a-fA-F]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(r'^\[(\d+)\][^"]*"([A-Z?])-([0-9a-fA-F]+)"\[(\d+)\](.*)$')
_SPEED = re.compile(r"\b(\d+)x(SDR|DDR|QDR|FDR10|FDR|EDR|HDR|NDR|XDR)\b")
_LANE_GBPS = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
_GIVEN = re.compile(r"^[^;]*;([^:;]+):.*$")
"""`MF0;NAME:MODEL/U1`: switches with an operating system of their own carry the name people gave them."""
_INSIDE = re.compile(r"aggregation node|sharp", re.IGNORECASE)
_MOST_NODES = 200_000


@dataclass
class _Node:
    kind: str
    guid: str
    words: str
    links: list[tuple[int, str, int, float]] = field(default_factory=list)
    """(own port, guid of the other side, its port, Gbit/s)."""


def looks_like_ibnetdiscover(text: str) -> bool:
    """Whether a line describes a switch or an adapter the way ibnetdiscover does."""
    return any(_NODE.match(line) for line in text.splitlines()[:5000])


def read_ibnetdiscover(text: str, *, where: str = "") -> Topology:
    """The fabric in `text`. Raises RecordError for text that is none, TrafficError where switches form no tiers."""
    nodes = _nodes(text, where)
    switches = {guid: node for guid, node in nodes.items() if node.kind == "Switch"}
    hosts = {g: n for g, n in nodes.items() if n.kind == "Ca" and not _INSIDE.search(n.words)}
    if not switches:
        raise RecordError("no switch in it", where=where)
    tier, notes = _tiers(switches, hosts, where=where)
    names = _names(switches)
    cables = _cables(switches, tier, names=names)
    ports, left_out = _ports(hosts, switches, tier=tier, names=names)
    inside = sum(1 for node in nodes.values() if node.kind != "Switch") - len(hosts)
    notes += [f"{inside} adapters inside switches and routers left out"] if inside else []
    notes += [f"{len(left_out)} hosts above the leaves left out: {', '.join(left_out[:5])}"] if left_out else []
    listed = tuple(Switch(names[guid], tier[guid]) for guid in switches)
    return Topology("infiniband", listed, tuple(ports), tuple(cables), "ibnetdiscover", tuple(notes))


def _nodes(text: str, where: str) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    current: _Node | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := _NODE.match(line):
            current = nodes.setdefault(match[3].lower(), _Node(match[1], match[3].lower(), match[4]))
            if len(nodes) > _MOST_NODES:
                raise RecordError(f"more than {_MOST_NODES} nodes", where=where)
        elif (match := _PORT.match(line)) and current is not None:
            speed = _SPEED.search(match[5])
            if speed is None:
                raise RecordError("a link without its speed", where=f"{where} line {number}".strip())
            gbps = int(speed[1]) * _LANE_GBPS[speed[2]]
            current.links.append((int(match[1]), match[3].lower(), int(match[4]), gbps))
        elif not line.strip():
            current = None
    return nodes


def _tiers(switches: dict[str, _Node], hosts: dict[str, _Node], *, where: str) -> tuple[dict[str, int], list[str]]:
    """Tier of each switch. A few hosts on a spine (a subnet manager, storage) do not make it a leaf."""
    count = {guid: sum(other in hosts for _, other, _, _ in node.links) for guid, node in switches.items()}
    above = {guid: {other for _, other, _, _ in node.links if other in switches} for guid, node in switches.items()}
    leaves = {guid for guid in switches if count[guid]}
    notes: list[str] = []
    for guid in sorted(leaves, key=lambda guid: count[guid]):
        rivals = above[guid] & leaves
        if len(rivals) >= 2 and 2 * count[guid] < sorted(count[other] for other in rivals)[len(rivals) // 2]:
            leaves.discard(guid)
            notes.append(f"{switches[guid].words!r} joins {len(rivals)} leaves and has {count[guid]} hosts: a spine")
    tier = dict.fromkeys(leaves, 1)
    level, wave = 1, leaves
    while wave:
        level += 1
        wave = {other for guid in wave for other in above[guid] if other not in tier}
        tier.update(dict.fromkeys(wave, level))
    lost = [node.words for guid, node in switches.items() if guid not in tier]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise TrafficError(f"switch {lost[0]!r} has no way to any host{more}", where=where)
    return tier, notes


def _names(switches: dict[str, _Node]) -> dict[str, str]:
    """Names of switches: what their description says, with the GUID where that is not unique."""
    plain = {guid: _GIVEN.sub(r"\1", node.words) for guid, node in switches.items()}
    plain = {guid: re.sub(r"[\s>]+", "-", name).strip("-") or guid for guid, name in plain.items()}
    often = Counter(plain.values())
    return {guid: name if often[name] == 1 else f"{name}-{guid[-6:]}" for guid, name in plain.items()}


def _cables(switches: dict[str, _Node], tier: dict[str, int], *, names: dict[str, str]) -> list[Cable]:
    speeds: dict[tuple[str, str], list[float]] = {}
    for guid, node in switches.items():
        for port, other, _, gbps in node.links:
            if other in switches and (tier[guid], guid) < (tier[other], other) or (other == guid and port):
                speeds.setdefault((guid, other), []).append(gbps)
    return [Cable(names[a], names[b], min(found), len(found)) for (a, b), found in speeds.items()]


def _ports(
    hosts: dict[str, _Node], switches: dict[str, _Node], *, tier: dict[str, int], names: dict[str, str]
) -> tuple[list[Port], list[str]]:
    """NIC ports; rails count the adapters of a host by name, sides the ports of an adapter."""
    adapters: dict[str, list[_Node]] = {}
    left_out: list[str] = []
    for node in hosts.values():
        host = node.words.split()[0] if node.words.split() else node.guid
        leaves = [tier.get(other, 1) for _, other, _, _ in node.links if other in switches]
        if leaves and min(leaves) > 1:
            left_out.append(host)
        else:
            adapters.setdefault(host, []).append(node)
    ports = []
    for host, found in adapters.items():
        for rail, node in enumerate(sorted(found, key=lambda node: (node.words, node.guid))):
            nic = "-".join(node.words.split()[1:]) or node.guid
            links = sorted(link for link in node.links if link[1] in switches)
            ports += [Port(host, nic, names[other], gbps, rail, own - 1) for own, other, _, gbps in links]
    return ports, left_out
