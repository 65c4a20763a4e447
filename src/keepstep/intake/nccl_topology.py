"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE; RCCL's too): the NICs of one host. It says nothing of switches."""

from __future__ import annotations

from typing import Any

from defusedxml import DefusedXmlException, ElementTree

from keepstep.errors import RecordError
from keepstep.records.topology import Port, Topology

__all__ = ["looks_like_nccl", "read_nccl_topology"]

_MOST_ELEMENTS = 200_000
_DEEPEST = 64


def looks_like_nccl(text: str) -> bool:
    """Whether it is XML with a <system> in it."""
    return text.lstrip()[:1] == "<" and "<system" in text[:20_000]


def read_nccl_topology(text: str, *, host: str, where: str = "") -> Topology:
    """The ports of the NICs of `host`, plugged into nothing. Raises RecordError for XML that is damaged or no topology.

    Rails follow `dev`, the number NCCL uses; ports 1 and 2 of a device are its sides. NCCL's speeds are Mbit/s.
    """
    try:
        root = ElementTree.fromstring(text, forbid_dtd=True)
    except (ElementTree.ParseError, DefusedXmlException, ValueError) as error:
        raise RecordError(f"not the XML of a topology: {error}", where=where) from error
    if root.tag != "system":
        raise RecordError(f"its root is <{root.tag}>, not <system>", where=where)
    found = sorted(_nets(root, where), key=lambda net: (net[0], net[2]))
    rails: dict[str, int] = {}
    ports = []
    for _, name, port, gbps in found:
        rail = rails.setdefault(name, len(rails))
        ports.append(Port(host, name, "", gbps, rail, port - 1))
    gpus = sum(1 for _ in root.iter("gpu"))
    notes = (f"one host with {gpus} GPUs and {len(rails)} NICs; the network between hosts is not in such a file",)
    return Topology(host, (), tuple(ports), (), "NCCL topology XML", notes)


def _nets(root: Any, where: str) -> list[tuple[int, str, int, float]]:
    """(dev, name, port, Gbit/s) of every <net>; GPUs and depth are counted on the way."""
    found: list[tuple[int, str, int, float]] = []
    stack = [(root, 1)]
    seen = 0
    while stack:
        element, depth = stack.pop()
        seen += 1
        if seen > _MOST_ELEMENTS or depth > _DEEPEST:
            raise RecordError("too many or too deeply nested elements", where=where)
        if element.tag == "net":
            found.append(_net(element, len(found), where=where))
        stack += [(child, depth + 1) for child in element]
    return found


def _net(element: Any, number: int, *, where: str) -> tuple[int, str, int, float]:
    try:
        dev = int(element.get("dev", number))
        gbps = float(element.get("speed", 0)) / 1000
        port = int(element.get("port", 1))
    except ValueError as error:
        raise RecordError(f"a <net> with a number that is none: {error}", where=where) from error
    return dev, element.get("name") or f"net{dev}", max(port, 1), gbps
