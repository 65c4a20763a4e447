"""A network and its plan as SVG: tiers from top to bottom, links coloured by how full the plan makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from keepstep.records.plan import Route
from keepstep.records.topology import Topology, link_name
from keepstep.traffic.network import Network

__all__ = ["draw"]

_MOST_LEAVES = 64
_BOX, _GAP, _TOP, _LEFT = 74, 14, 74, 96
_COLOURS = ("#2a78b8", "#5aa469", "#d8a31a", "#c8452e")
_WORDS = ("below the bound", "at the bound", "above it", "twice it or more")
_TIERS = {1: "leaves", 2: "spines", 3: "cores"}


def draw(network: Network, routes: Iterable[Route] = (), *, bound: float = 0.0, title: str = "") -> str:
    """The SVG. Of a network with more than 64 leaves one part (or the first 64 leaves) is shown, and that is said."""
    topology = network.topology
    leaves, note = _chosen(network)
    tiers = _shown(network, leaves)
    width = _LEFT + max(len(names) for names in tiers.values()) * (_BOX + _GAP) + 20
    width = max(width, 800)
    row = min(420, 110 + width // 14)
    height = _TOP + (len(tiers) - 1) * row + 130
    place = _places(tiers, width, row=row)
    loads = _loads(routes)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="17" font-weight="bold" fill="#222">{escape(title or topology.name)}</text>',
        f'<text x="16" y="46" fill="#666">{escape(_summary(topology) + note)}</text>',
        *_cables(network, place, loads=loads, bound=bound),
        *_switches(network, tiers, place=place),
        *_legend(height, planned=bool(loads), down=bool(network.down)),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _chosen(network: Network) -> tuple[list[str], str]:
    leaves = [switch.name for switch in network.topology.switches if switch.tier == 1]
    if len(leaves) <= _MOST_LEAVES:
        return leaves, ""
    part = network.parts[0]
    return part[:_MOST_LEAVES], f"; {min(len(part), _MOST_LEAVES)} of {len(leaves)} leaves are shown"


def _shown(network: Network, leaves: Sequence[str]) -> dict[int, list[str]]:
    """Names by tier, what is above the leaves shown, the highest tier first."""
    tiers: dict[int, list[str]] = {1: list(leaves)}
    level = 1
    while any(network.uppers[name] for name in tiers[level]):
        tiers[level + 1] = list(dict.fromkeys(upper for name in tiers[level] for upper in network.uppers[name]))
        level += 1
    return dict(sorted(tiers.items(), reverse=True))


def _places(tiers: dict[int, list[str]], width: int, *, row: int) -> dict[str, tuple[float, float]]:
    place: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(tiers.values()):
        step = (width - _LEFT - 20) / len(names)
        for column, name in enumerate(names):
            place[name] = (_LEFT + step * (column + 0.5), _TOP + level * row)
    return place


def _loads(routes: Iterable[Route]) -> dict[str, int]:
    """Flows on the fullest cable of each directed link."""
    each: Counter[tuple[str, int]] = Counter()
    for route in routes:
        for start, end in zip(route.path, route.path[1:], strict=False):
            each[link_name(start, end), route.cable] += 1
    fullest: dict[str, int] = {}
    for (link, _), flows in each.items():
        fullest[link] = max(fullest.get(link, 0), flows)
    return fullest


def _cables(
    network: Network, place: dict[str, tuple[float, float]], *, loads: dict[str, int], bound: float
) -> Iterator[str]:
    most = 2.5 if len(network.topology.cables) <= 100 else 0.8
    widest = max((cable.gbps * cable.count for cable in network.topology.cables), default=1.0)
    for cable in network.topology.cables:
        if cable.lower not in place or cable.upper not in place:
            continue
        (x1, y1), (x2, y2) = place[cable.lower], place[cable.upper]
        thick = 0.8 + most * cable.gbps * cable.count / widest
        flows = max(loads.get(link_name(*ends), 0) for ends in ((cable.lower, cable.upper), (cable.upper, cable.lower)))
        up = network.alive(cable.lower, cable.upper) and network.alive(cable.upper, cable.lower)
        colour = "#c8452e" if not up else "#cccccc" if not flows else _COLOURS[_degree(flows, bound)]
        dashes = "" if up else ' stroke-dasharray="3 5"'
        words = (
            f"{cable.lower} - {cable.upper}: {cable.count} x {cable.gbps:g} Gbit/s, {flows} flows on a cable at most"
        )
        yield (
            f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="{colour}" '
            f'stroke-width="{thick:.1f}"{dashes}><title>{escape(words + ("" if up else ", down"))}</title></line>'
        )


def _degree(flows: int, bound: float) -> int:
    if flows < bound:
        return 0
    return 1 if flows <= bound or not bound else 2 if flows < 2 * bound else 3


def _switches(network: Network, tiers: dict[int, list[str]], *, place: dict[str, tuple[float, float]]) -> Iterator[str]:
    hosts: dict[str, dict[str, None]] = {}
    for port in network.topology.ports:
        hosts.setdefault(port.leaf, {})[port.host] = None
    for tier, names in tiers.items():
        yield f'<text x="16" y="{place[names[0]][1] + 4:.0f}" fill="#666">{_TIERS.get(tier, f"tier {tier}")}</text>'
        for name in names:
            x, y = place[name]
            edge = "#c8452e" if name in network.down else "#444"
            yield f"<g><title>{escape(name)}</title>"
            yield (
                f'<rect x="{x - _BOX / 2:.0f}" y="{y - 14:.0f}" width="{_BOX}" height="28" rx="5" fill="#f4f4f0" '
                f'stroke="{edge}"/>'
            )
            words = escape(_short(name))
            yield f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="#222">{words}</text></g>'
            if tier == 1:
                yield from _hosts(list(hosts.get(name, ())), x, y=y)


def _hosts(names: list[str], x: float, *, y: float) -> Iterator[str]:
    if names:
        count = f"{len(names)} host{'s' if len(names) > 1 else ''}"
        yield f'<line x1="{x:.0f}" y1="{y + 14:.0f}" x2="{x:.0f}" y2="{y + 30:.0f}" stroke="#999"/>'
        yield f'<text x="{x:.0f}" y="{y + 44:.0f}" text-anchor="middle" fill="#444">{count}</text>'
        few = _short(names[0], 9) if len(names) == 1 else f"{_short(names[0], 5)}..{_short(names[-1], 5)}"
        small = 'text-anchor="middle" fill="#888" font-size="10"'
        yield f'<text x="{x:.0f}" y="{y + 59:.0f}" {small}>{escape(few)}</text>'


def _short(name: str, most: int = 11) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _legend(height: int, *, planned: bool, down: bool) -> Iterator[str]:
    entries = [(colour, words, "") for colour, words in zip(_COLOURS, _WORDS, strict=True)] if planned else []
    entries.append(("#cccccc", "no planned flow" if planned else "cable", ""))
    if down:
        entries.append(("#c8452e", "down", ' stroke-dasharray="3 5"'))
    x, y = 16, height - 16
    for colour, words, dashes in entries:
        yield f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" stroke="{colour}" stroke-width="4"{dashes}/>'
        yield f'<text x="{x + 28}" y="{y + 4}" fill="#444">{words}</text>'
        x += 44 + int(6.5 * len(words))


def _summary(topology: Topology) -> str:
    tiers = Counter(switch.tier for switch in topology.switches)
    words = [f"{len(topology.hosts)} hosts, {len(topology.ports)} ports"]
    words += [f"{count} {_TIERS.get(tier, f'of tier {tier}')}" for tier, count in sorted(tiers.items())]
    return ", ".join(words)
