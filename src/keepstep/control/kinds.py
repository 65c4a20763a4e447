"""Which ranks do the same work, and which kinds of them a standby warms up for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from keepstep.records.sandbox_messages import MOST_KINDS, RoleKind

__all__ = ["choose_kinds"]


def choose_kinds(kinds: Mapping[int, str], memory_bytes: Mapping[int, int]) -> tuple[RoleKind, ...]:
    """At most three of the role `kinds` (by rank): those of the first and the last rank and the most common one.

    The most common one (of equals the one with the lowest rank) comes last: it is the one that stays hot. Each is
    represented by its highest rank (the lowest is often the root of collectives, which receives nothing), and needs the
    most of its ranks' `memory_bytes`.
    """
    if not kinds:
        return ()
    counts = Counter(kinds[rank] for rank in sorted(kinds))
    common = counts.most_common(1)[0][0]
    others = [kinds[min(kinds)], kinds[max(kinds)], *(name for name, _ in counts.most_common())]
    wanted = [name for name in dict.fromkeys(others) if name != common][: MOST_KINDS - 1]
    return tuple(_kind(name, kinds, memory_bytes=memory_bytes) for name in (*wanted, common))


def _kind(name: str, kinds: Mapping[int, str], *, memory_bytes: Mapping[int, int]) -> RoleKind:
    ranks = tuple(rank for rank in sorted(kinds) if kinds[rank] == name)
    return RoleKind(name, ranks[-1], ranks, max(memory_bytes.get(rank, 0) for rank in ranks))
