"""Failure domains from a file: our own TOML, or what a topology file says of switches.

Our own: one table for each kind of domain, in it the nodes of each label, in Slurm's way of writing host names:

    [rack]
    r1 = "n[0-3]"
    r2 = ["n4", "n[5-7]"]
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import RecordError, UsageError
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.topology_assumed import Assumed
from keepstep.intake.topology_file import read_text, read_topology
from keepstep.records.topology import ClosShape, Topology

__all__ = ["checked_label", "read_domains", "topology_domains"]

_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}\Z")
_LABEL = re.compile(r"[^\x00-\x1f\x7f=]{1,128}\Z")
_OWN = "node"


def checked_label(kind: str, label: str, *, where: str) -> None:
    """Raises UsageError if `kind` or `label` cannot be one."""
    if kind == _OWN:
        raise UsageError("every node is a domain of its own", where=where, remedy="name another kind: rack, power, ...")
    if not _KIND.match(kind):
        raise UsageError(f"{kind!r} is no kind of domain", where=where, remedy="a short word in lower case, as rack")
    if not _LABEL.match(label):
        raise UsageError(f"{label[:40]!r} is no label of a {kind}", where=where, remedy="1 to 128 characters without =")


def read_domains(path: Path) -> dict[str, dict[str, str]]:
    """For each node its label of each kind: from TOML (a name that ends in `.toml`) or a topology file of a known kind.

    Raises UsageError for a file that is no such thing, and for a node with two labels of one kind.
    """
    try:
        if path.suffix == ".toml":
            return _toml(read_text(path), where=str(path))
        topology = read_topology(path, Assumed())
    except RecordError as error:
        raise UsageError(error.what, where=error.where or str(path), remedy=error.remedy) from error
    if isinstance(topology, ClosShape):
        raise UsageError("only measures of a network, no host names", where=str(path), remedy="name hosts and leaves")
    return topology_domains(topology)


def _toml(text: str, *, where: str) -> dict[str, dict[str, str]]:
    try:
        found: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"not TOML: {error}", where=where) from error
    domains: dict[str, dict[str, str]] = {}
    for kind, table in found.items():
        if not isinstance(table, dict):
            raise UsageError(f"{kind!r} is no table", where=where, remedy='write [rack] and then r1 = "n[0-3]"')
        for label, hosts in table.items():
            checked_label(kind, label, where=where)
            for node in _nodes(hosts, where=f"{where}: {kind}.{label}"):
                earlier = domains.setdefault(node, {}).setdefault(kind, label)
                if earlier != label:
                    raise UsageError(f"node {node} is in {kind} {earlier} and in {kind} {label}", where=where)
    return domains


def _nodes(hosts: Any, *, where: str) -> tuple[str, ...]:
    parts = [hosts] if isinstance(hosts, str) else hosts
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise UsageError("nodes are a text or a list of texts", where=where, remedy='for example "n[0-3]"')
    try:
        nodes = tuple(node for part in parts for node in expand_hosts(part))
    except RecordError as error:
        raise UsageError(error.what, where=where) from error
    if not nodes or any(not node.strip() for node in nodes):
        raise UsageError("names no node", where=where, remedy="leave the label out")
    return nodes


def topology_domains(topology: Topology) -> dict[str, dict[str, str]]:
    """The domains that a network shows: `switch` is the leaf a host hangs on alone, `switch2`, ... what is above it.

    A host with several leaves, and a switch with several above it, survive the loss of one: no label then. Domains that
    hosts and switches name themselves (`rack r1`, `rack=r1`) are taken too.
    """
    above: dict[str, set[str]] = {}
    for cable in topology.cables:
        above.setdefault(cable.lower, set()).add(cable.upper)
    named = {switch.name: switch.domains for switch in topology.switches}
    leaves: dict[str, set[str]] = {}
    domains: dict[str, dict[str, str]] = {}
    for port in topology.ports:
        leaves.setdefault(port.host, set()).add(port.leaf)
        domains.setdefault(port.host, {}).update(_own_words(port.domains))
    for host, some in leaves.items():
        tier, labels = 1, domains[host]
        while len(some) == 1 and "" not in some and tier < 8:
            (switch,) = some
            labels = {**_own_words(named.get(switch, ())), "switch" if tier == 1 else f"switch{tier}": switch, **labels}
            some, tier = above.get(switch, set()), tier + 1
        domains[host] = labels
    return {host: labels for host, labels in domains.items() if labels}


def _own_words(domains: tuple[str, ...]) -> dict[str, str]:
    """`rack r1` and `rack=r1` by kind; a single word is of the kind `domain`."""
    found = {}
    for text in domains:
        kind, label = re.split(r"[= ]", text, maxsplit=1) if re.search(r"[= ]", text) else ("domain", text)
        if _KIND.match(kind) and kind != _OWN and label:
            found[kind] = label
    return found
