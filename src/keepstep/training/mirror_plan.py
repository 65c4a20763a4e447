"""Who needs a mirror, and whether the copies fit: worked out alike by all members of a generation, from what each of
them says of itself in one vote. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

__all__ = ["VERSIONS", "MirrorPlan", "Share", "in_need", "plan_of", "votes_of"]

VERSIONS = 2
"""So many versions a member keeps in host memory of its own state, and of each state that it holds for another."""
_SHARE = 0.5  # of the memory that is free; more is taken only where the script asks for mirrors
_MOST = (1 << 31) - 1
_WORDS = 4
_FIELDS = 2 * _WORDS + 4
_UNIT = 1 << 16


class Share(NamedTuple):
    """What one member says: who holds the same state (`replica`), where it is, the bytes of its state, which rank holds
    its mirror (-1: it does not know yet), how many bytes the copies here have taken, and how many are free on its node.
    """

    replica: str
    node: str
    nbytes: int
    holder: int
    taken: int
    free: int


class MirrorPlan(NamedTuple):
    """Whose state is mirrored, and whether there is room: where there is none, nobody's is."""

    need: frozenset[int]
    room: bool

    @property
    def active(self) -> bool:
        """Whether copies are made."""
        return bool(self.need) and self.room


def in_need(keys: Mapping[int, tuple[object, object]]) -> frozenset[int]:
    """The ranks whose state would be gone with their node; `keys` gives (replica, node) by rank.

    Where all ranks are on one node: those whose state no other rank has.
    """
    nodes = {node for _, node in keys.values()}
    where: dict[object, list[object]] = defaultdict(list)
    for replica, node in keys.values():
        where[replica].append(node)
    alone = (lambda has: len(set(has)) == 1) if len(nodes) > 1 else (lambda has: len(has) == 1)
    return frozenset(rank for rank, (replica, _) in keys.items() if alone(where[replica]))


def votes_of(share: Share, place: int, *, world: int, wanted: bool) -> list[int]:
    """The votes of the member at `place` among `world`; of each, the least over all members counts.

    `wanted`: the script asks for mirrors in any case.
    """
    votes = [_MOST] * (1 + _FIELDS * world)
    votes[0] = int(wanted)
    sizes = (-(-share.nbytes // _UNIT), share.taken // _UNIT, share.free // _UNIT)
    at = 1 + _FIELDS * place
    row = [*_words(share.replica), *_words(share.node), share.holder, *(min(_MOST, size) for size in sizes)]
    votes[at : at + _FIELDS] = row
    return votes


def plan_of(least: Sequence[int], ranks: Sequence[int]) -> MirrorPlan:
    """What follows from the least of all votes. `ranks` are those of the members, in the order of their places.

    Members of one node take from the same memory: together they may take half of what is free. A member that does not
    know its holder is taken to be it.
    """
    rows = {rank: tuple(least[1 + _FIELDS * at : 1 + _FIELDS * (at + 1)]) for at, rank in enumerate(ranks)}
    if least[0]:
        return MirrorPlan(frozenset(ranks), room=True)
    keys = {rank: (row[:_WORDS], row[_WORDS : 2 * _WORDS]) for rank, row in rows.items()}
    need = in_need(keys)
    wanted = {rank: VERSIONS * row[-3] for rank, row in rows.items()}
    for rank in need:
        holder = rows[rank][-4]
        wanted[holder if holder in rows else rank] += VERSIONS * rows[rank][-3]
    lacking: dict[object, int] = defaultdict(int)
    free: dict[object, int] = {}
    for rank, row in rows.items():
        node = keys[rank][1]
        lacking[node] += max(0, wanted[rank] - row[-2])
        free[node] = min(free.get(node, _MOST), row[-1])
    room = all(lacking[node] <= _SHARE * free[node] for node in free)
    return MirrorPlan(need, room)


def _words(text: str) -> list[int]:
    """120 bits of hash over `text`, as small numbers that fit a vote."""
    number = xxhash.xxh3_128_intdigest(text.encode())
    return [(number >> 30 * index) & ((1 << 30) - 1) for index in range(_WORDS)]
