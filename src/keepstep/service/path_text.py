"""A catalogue of paths as people read it."""

from __future__ import annotations

from itertools import groupby

from keepstep.records.plan import Catalogue, PortPath

__all__ = ["catalogue_text"]

_METHODS = {
    "ttl": "packets that die on the way",
    "round_trip": "waiting behind a load (names of paths hold for this pair only)",
}


def catalogue_text(found: Catalogue) -> str:
    """One line a path: its state, round trip and ports."""

    def path(one: PortPath) -> tuple[str, ...]:
        return one.path

    lines = [f"{found.source} to {found.destination}, {len(found.ports)} source ports, by {_METHODS[found.method]}"]
    for way, group in groupby(sorted(found.ports, key=lambda one: (path(one), one.source_port)), key=path):
        ports = list(group)
        name = " > ".join(way) or "no answer"
        time = f"{ports[0].round_trip_s * 1e3:8.3f} ms" if ports[0].round_trip_s else "          -"
        lines.append(f"  {ports[0].state:5} {name:24} {time}  ports {_ranges([one.source_port for one in ports])}")
    if found.taken:
        lines.append(f"  in use here, not looked at: ports {_ranges(sorted(found.taken))}")
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
