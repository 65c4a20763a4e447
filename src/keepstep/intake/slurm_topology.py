"""Slurm's topology.conf, tree and block, and what `scontrol show topology` prints.

Slurm names one switch above each leaf and no capacity: both are assumed, and said so in the notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.errors import RecordError, TrafficError
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.topology_assumed import Assumed
from keepstep.records.topology import Cable, Port, Switch, Topology

__all__ = ["looks_like_slurm", "read_slurm_topology"]

_HEAD = re.compile(r"^\s*(SwitchName|BlockName)\s*=", re.IGNORECASE | re.MULTILINE)
_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_ROOT = "above-blocks"
_MOST_CABLES = 4_000_000


def looks_like_slurm(text: str) -> bool:
    """Whether a line begins with SwitchName= or BlockName=."""
    return _HEAD.search(text) is not None


def read_slurm_topology(text: str, assumed: Assumed, *, where: str = "") -> Topology:
    """The topology in `text`. Raises RecordError for lines that are none, TrafficError for a switch above itself."""
    lines = list(_lines(text, where))
    if any("blockname" in fields for fields in lines):
        return _blocks(lines, assumed, where=where)
    return _tree(lines, assumed, where=where)


def _lines(text: str, where: str) -> Iterator[dict[str, str]]:
    joined = re.sub(r"\\\r?\n", "", text)
    for number, line in enumerate(joined.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        fields = {key.lower(): value for key, value in _PAIR.findall(line)}
        if "aggregatedblock" in fields:
            continue  # several blocks in one line, as `scontrol show topology` adds: they have lines of their own
        if not fields.keys() & {"switchname", "blockname", "blocksizes"}:
            raise RecordError(f"{line[:60]!r} names no switch and no block", where=f"{where} line {number}".strip())
        if rest := _PAIR.sub("", line).strip():
            raise RecordError(f"{rest[:60]!r} is no KEY=VALUE", where=f"{where} line {number}".strip())
        yield fields


def _tree(lines: list[dict[str, str]], assumed: Assumed, *, where: str) -> Topology:
    children: dict[str, tuple[str, ...]] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    for fields in lines:
        name = fields.get("switchname", "")
        if not name:
            raise RecordError("BlockSizes, but no block", where=where)
        if name in children:
            raise RecordError(f"switch {name!r} is listed twice", where=where)
        children[name] = expand_hosts(fields.get("switches", ""))
        nodes[name] = () if children[name] else expand_hosts(fields.get("nodes", ""))
    for name, below in children.items():
        absent = next((child for child in below if child not in children), None)
        if absent is not None:
            raise TrafficError(f"switch {name!r} is above {absent!r}, which is not listed", where=where)
    tier = _tiers(children, where=where)
    switches, cables = _expanded(children, tier, assumed=assumed, where=where)
    ports = tuple(Port(host, "nic0", leaf, assumed.gbps) for leaf, hosts in nodes.items() for host in hosts)
    notes = [f"no capacities in the file: {assumed.gbps:g} Gbit/s a port, {assumed.cable_gbps:g} a cable assumed"]
    notes.append(f"Slurm names one switch above each; each stands for {assumed.spines} here")
    plugged = {host for hosts in nodes.values() for host in hosts}
    listed = (host for fields in lines for host in expand_hosts(fields.get("nodes", "")))
    lost = [host for host in dict.fromkeys(listed) if host not in plugged]
    notes += [f"{len(lost)} hosts that are below no leaf left out: {', '.join(lost[:5])}"] if lost else []
    return Topology("slurm", tuple(switches), ports, tuple(cables), "Slurm topology.conf, tree", tuple(notes))


def _tiers(children: dict[str, tuple[str, ...]], *, where: str) -> dict[str, int]:
    tier: dict[str, int] = {}
    waiting = dict(children)
    while waiting:
        ready = [name for name, below in waiting.items() if all(child in tier for child in below)]
        if not ready:
            raise TrafficError(f"a loop: switch {next(iter(waiting))!r} is above itself", where=where)
        for name in ready:
            tier[name] = 1 + max((tier[child] for child in waiting.pop(name)), default=0)
    return tier


def _expanded(
    children: dict[str, tuple[str, ...]], tier: dict[str, int], *, assumed: Assumed, where: str
) -> tuple[list[Switch], list[Cable]]:
    """Switches above the leaves multiplied; where a leaf hangs deeper than its parent asks, switches between them."""

    def names(switch: str) -> list[str]:
        many = assumed.spines if tier[switch] > 1 else 1
        return [switch] if many == 1 else [f"{switch}.{number}" for number in range(many)]

    switches = [Switch(name, tier[switch]) for switch in children for name in names(switch)]
    cables: list[Cable] = []
    for parent, below in children.items():
        for child in below:
            lower = names(child)
            for level in range(tier[child] + 1, tier[parent]):
                between = [f"{child}~{level}.{parent}"]
                switches.append(Switch(between[0], level))
                cables += [Cable(low, high, assumed.cable_gbps) for low in lower for high in between]
                lower = between
            cables += [Cable(low, high, assumed.cable_gbps) for low in lower for high in names(parent)]
            _check_count(len(cables), where=where)
    return switches, cables


def _check_count(cables: int, *, where: str) -> None:
    if cables > _MOST_CABLES:
        raise RecordError(f"more than {_MOST_CABLES} cables", where=where, remedy="assume fewer --spines")


def _blocks(lines: list[dict[str, str]], assumed: Assumed, *, where: str) -> Topology:
    blocks: dict[str, tuple[str, ...]] = {}
    for fields in lines:
        if "blockname" in fields:
            if fields["blockname"] in blocks:
                raise RecordError(f"block {fields['blockname']!r} is listed twice", where=where)
            blocks[fields["blockname"]] = expand_hosts(fields.get("nodes", ""))
    _check_count(len(blocks) * assumed.spines, where=where)
    spines = [f"{_ROOT}.{number}" for number in range(assumed.spines)]
    switches = [Switch(name, 1, (f"block {name}",)) for name in blocks] + [Switch(name, 2) for name in spines]
    cables = tuple(Cable(block, spine, assumed.cable_gbps) for block in blocks for spine in spines)
    ports = tuple(Port(host, "nic0", block, assumed.gbps) for block, hosts in blocks.items() for host in hosts)
    sizes = next((fields["blocksizes"] for fields in lines if "blocksizes" in fields), "not given")
    notes = (
        f"no capacities in the file: {assumed.gbps:g} Gbit/s a port, {assumed.cable_gbps:g} a cable assumed",
        f"a block is taken for a leaf; {assumed.spines} spines above all are assumed (BlockSizes: {sizes})",
    )
    return Topology("slurm", tuple(switches), ports, cables, "Slurm topology.conf, block", notes)
