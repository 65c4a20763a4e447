"""Which source ports lead where: what probing answered, way by way, and the choice of ports for a pair of routes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from keepstep.records.path_messages import Way

__all__ = ["ENOUGH_WAYS", "PORTS_PER_LINK", "PortMap", "choose_ports", "unnamed_hops", "unused_links"]

PORTS_PER_LINK = 8
"""Ports given for one connection: one that was just in use cannot be had again at once."""

ENOUGH_WAYS = 16
"""Ways between two leaves that must have been probed to tell that none of them takes a link."""

_Ends = tuple[str, str]
_MOSTLY = 0.9


class PortMap:
    """The switch of every probed way, and whether a packet came through beyond it."""

    def __init__(self) -> None:
        self._spine: dict[Way, str] = {}
        self._through: dict[Way, bool] = {}

    def learn(self, answers: Mapping[Way, Sequence[str]], names: Mapping[str, str]) -> None:
        """Take the answers of a whole probing, (hop, hop beyond) by way.

        `names` by address of an answering switch. A silent way keeps the switch it was known to pass.
        """
        before, self._spine, self._through = self._spine, {}, {}
        for way, hops in answers.items():
            answered = bool(hops) and hops[0] != ""
            self._spine[way] = names.get(hops[0], hops[0]) if answered else before.get(way, "")
            self._through[way] = answered and (len(hops) < 2 or hops[1] != "")

    def spine(self, way: Way) -> str:
        """The switch that the way passes; empty: unknown."""
        return self._spine.get(way, "")

    def usable(self, way: Way) -> bool:
        """Whether packets came through."""
        return self._through.get(way, False)

    def ports(self, source: str, destination: str, *, port: int) -> list[int]:
        """The probed source ports of connections between these ends, in order."""
        key = (source, destination, port)
        return sorted(way.source_port for way in self._spine if (way.source, way.destination, way.port) == key)

    def mirrored(self) -> bool:
        """Whether the way back passes the switch of the way there: the leaves hash both directions alike."""
        both = [
            (spine, self._spine.get(Way(way.destination, way.port, way.source, way.source_port), ""))
            for way, spine in self._spine.items()
        ]
        told = [(there, back) for there, back in both if there and back]
        return bool(told) and sum(there == back for there, back in told) >= _MOSTLY * len(told)

    def strayed(self, answers: Mapping[Way, Sequence[str]], names: Mapping[str, str]) -> bool:
        """Whether a way that was usable passes another switch now, or none."""
        return any(
            self.usable(way) and (not all(hops) or names.get(hops[0], hops[0]) != self._spine[way])
            for way, hops in answers.items()
        )

    def used(self, ways: Iterable[Way]) -> set[str]:
        """The switches that the usable ones of some ways pass."""
        return {self.spine(way) for way in ways if self.usable(way)}


def unnamed_hops(
    answers: Mapping[Way, Sequence[str]], names: Mapping[str, str], *, switches: Container[str], ttl: int
) -> str:
    """What is wrong where no way was answered by one of `switches`, as `names` by address say; empty if one was."""
    heard = sorted({hops[0] for hops in answers.values() if hops and hops[0]})
    if any(names.get(address, address) in switches for address in heard):
        return ""
    others = f"only from {', '.join(heard[:4])}{' and others' * (len(heard) > 4)}" if heard else "nobody answers"
    return f"no answer came from an address in [hops] at ttl {ttl} ({others}); flows are left to chance"


def unused_links(used: Mapping[_Ends, set[str]], spines: Mapping[_Ends, Sequence[str]]) -> set[str]:
    """Links between leaves that no usable way takes, of the `spines` that could: they are down, or the leaf does not
    use them. `used` are the spines that ways between two leaves take; where none is known nothing can be told. Of the
    two links over a spine that is not used, one that other leaves use is not to blame.
    """
    taken = {link for ends, switches in used.items() for spine in switches for link in _links(ends, spine)}
    found: set[str] = set()
    for ends, switches in spines.items():
        unused = set(switches) - used[ends] if used[ends] & set(switches) else set()
        for both in (_links(ends, spine) for spine in unused):
            found |= both - taken or both
    return found


def _links(ends: _Ends, spine: str) -> set[str]:
    return {f"{ends[0]}>{spine}", f"{spine}>{ends[1]}"}


def choose_ports(
    found: PortMap, ends: tuple[str, str, int], *, ahead: Sequence[str], back: Sequence[str]
) -> tuple[tuple[int, ...], bool]:
    """Up to `PORTS_PER_LINK` source ports for a connection from address `ends[0]` to `ends[1:]` whose bytes pass the
    switch `ahead[0]` on the way there and `back[0]` on the way back; an empty sequence asks for none in particular.

    The second value is False where only the way there could be met. No port at all: ((), False).
    """
    source, destination, port = ends

    def fits(number: int, wanted: Sequence[str], *, there: bool) -> bool:
        way = Way(source, number, destination, port) if there else Way(destination, port, source, number)
        return not wanted or (found.usable(way) and found.spine(way) == wanted[0])

    numbers = found.ports(source, destination, port=port)
    forward = [number for number in numbers if fits(number, ahead, there=True)]
    both = [number for number in forward if fits(number, back, there=False)]
    if not forward and back:  # only the bytes that come back were planned, or nothing fits ahead
        both = [] if ahead else [number for number in numbers if fits(number, back, there=False)]
    chosen = both or forward
    return tuple(chosen[:PORTS_PER_LINK]), bool(both)
