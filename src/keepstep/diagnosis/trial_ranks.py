"""Which ranks are tried out: one of each kind, both sides of every boundary between groups, and who they talk to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from keepstep.records.trial import CallKept, Trace

__all__ = ["first_ranks", "kind_of", "more_ranks", "peers_of"]

_ALL_OF = 8
_PAIRED = (10, 11)

_Family = list[tuple[int, ...]]
"""Groups of one size that the script makes at one line: those of one dimension."""


def first_ranks(world: int, wanted: Sequence[int], *, local: int) -> list[int]:
    """The ranks to begin with: all of a small world; else `wanted`, the ends, the middle, both sides of the boundary
    between the first two nodes of `local` ranks."""
    if world <= _ALL_OF:
        return list(range(world))
    known = [0, world - 1, *wanted, world // 2, 1, local - 1, local]
    return _distinct(known, world)


def more_ranks(trace: Trace, world: int) -> list[int]:
    """What the groups of `trace` add, the most telling first: neighbours and ends inside the groups, both sides of the
    boundaries between first and last groups, and one rank of each kind."""
    families = _families(trace, world)
    inside: list[int] = []
    borders: list[int] = []
    for family in families:
        own = next((group for group in family if trace.rank in group), family[0])
        size = len(own)
        inside += [own[place] for place in (0, 1, size - 1, size // 2, size - 2) if 0 <= place < size]
        if size <= _ALL_OF:
            inside += own
        if len(family) > 1:
            borders += [family[0][-1], family[1][0], family[-2][-1], family[-1][0], family[-1][-1]]
    kinds: dict[tuple[str, ...], int] = {}
    if families:
        places = _places(families)
        for rank in range(world):
            kinds.setdefault(tuple(_kind(places[number].get(rank)) for number in range(len(families))), rank)
    return _distinct([*inside, *borders, *kinds.values()], world)


def peers_of(traces: Iterable[Trace], world: int) -> list[int]:
    """Ranks that those under trial send to or receive from, without a trial of their own."""
    known = list(traces)
    have = {trace.rank for trace in known}
    peers = [e.peer for trace in known for e in trace.events if isinstance(e, CallKept) and e.op in _PAIRED]
    return [rank for rank in _distinct(peers, world) if rank not in have]


def kind_of(trace: Trace, world: int) -> str:
    """The kind of a rank in words: where it stands in the groups of each dimension."""
    families = _families(trace, world)
    words = []
    for number, places in enumerate(_places(families)):
        purpose = _purpose(trace, families[number])
        words.append(f"{purpose or f'dimension {number}'} {_kind(places.get(trace.rank))}")
    return ", ".join(words) or _kind((trace.rank, world))


def _families(trace: Trace, world: int) -> list[_Family]:
    """Groups of more than one rank and less than all, by the line that makes them and their size."""
    found: dict[tuple[int, int, str], _Family] = defaultdict(list)
    for group in trace.groups:
        if 1 < len(group.ranks) < world:
            found[group.site, len(group.ranks), group.purpose].append(group.ranks)
    return list(found.values())


def _purpose(trace: Trace, family: _Family) -> str:
    return next((g.purpose for g in trace.groups if g.ranks == family[0] and g.purpose not in ("", "undefined")), "")


def _places(families: Sequence[_Family]) -> list[dict[int, tuple[int, int]]]:
    """For each family: place and size of the group, by rank."""
    return [{rank: (i, len(group)) for group in family for i, rank in enumerate(group)} for family in families]


def _kind(place: tuple[int, int] | None) -> str:
    if place is None:
        return "outside"
    number, size = place
    return "first" if number == 0 else "last" if number == size - 1 else "middle"


def _distinct(ranks: Iterable[int], world: int) -> list[int]:
    return list(dict.fromkeys(rank for rank in ranks if 0 <= rank < world))
