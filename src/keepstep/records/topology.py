"""The network of a site as data: hosts with their NIC ports, switches in tiers, the cables between them.

Tier 1 is what NIC ports are plugged into (leaf, access, ToR), tier 2 joins leaves (spine), tier 3 joins spines (core).
A directed link is named `lower>upper` on the way up and `upper>lower` on the way down; a path is the switches it
passes, from leaf to leaf.
"""

from __future__ import annotations

import msgspec

__all__ = ["Cable", "ClosShape", "Port", "Switch", "Topology", "link_name", "split_link"]

_LINK = ">"


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One switch. `domains` are what it is lost together with: a rack, a power feed."""

    name: str
    tier: int
    domains: tuple[str, ...] = ()


class Port(msgspec.Struct, frozen=True, omit_defaults=True):
    """One port of a NIC of a host, plugged into `leaf` ("" where the source does not tell); `gbps` each way.

    `rail` counts the NICs of a host from 0, `side` the ports of one NIC (0 left, 1 right).
    """

    host: str
    nic: str
    leaf: str
    gbps: float
    rail: int = 0
    side: int = 0
    domains: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique in a topology."""
        return f"{self.host}/{self.nic}/{self.side}"


class Cable(msgspec.Struct, frozen=True, omit_defaults=True):
    """`count` parallel cables between two switches, each of `gbps` each way."""

    lower: str
    upper: str
    gbps: float
    count: int = 1


class Topology(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole network. `source` is the format it came from, `notes` what had to be assumed or was left out."""

    name: str
    switches: tuple[Switch, ...]
    ports: tuple[Port, ...]
    cables: tuple[Cable, ...]
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, in order of appearance."""
        return tuple(dict.fromkeys(port.host for port in self.ports))


class ClosShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`hosts` hosts in groups of `hosts_per_leaf`; a group has one leaf for each rail and side.

    With `separate_rails` every rail (and always every side) has `spines` spines of its own, else all rails share them.
    `cables` parallel cables of `uplink_gbps` join each leaf to each spine; `pods` above 1 puts `cores` cores of tier 3
    over the spines, spines and leaves being divided among pods: core c over the spines c modulo `spines` of every pod.
    """

    hosts: int
    hosts_per_leaf: int
    spines: int
    rails: int = 1
    sides: int = 1
    port_gbps: float = 200.0
    uplink_gbps: float = 400.0
    cables: int = 1
    separate_rails: bool = False
    pods: int = 1
    cores: int = 0
    name: str = "clos"


def link_name(start: str, end: str) -> str:
    """The directed link between two switches."""
    return f"{start}{_LINK}{end}"


def split_link(name: str) -> tuple[str, str]:
    """The two ends of a link; the second is empty where `name` is that of a switch."""
    start, _, end = name.partition(_LINK)
    return start, end
