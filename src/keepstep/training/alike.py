"""Whether replicas have the same values in extra objects that are too large to be one rank's own.

An agreement says whether any member has such objects. If so, all compare digests at the next boundary: once in every
generation, and after 1, 2, 4, 8, ... updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import xxhash

from keepstep.errors import UsageError
from keepstep.training.extras import OWN_BYTES
from keepstep.training.fabric import Fabric
from keepstep.training.state import TrackedState

__all__ = ["Alike", "differing"]

_VOTE = "large_extra"
_MOST = (1 << 31) - 1
_WORDS = 2


class Alike:
    """The comparison as one member sees it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._large = False
        self._agreed_in = self._compared_in = -1
        fabric.ballot.add(_VOTE, self._vote)

    def agreed(self) -> None:
        """An agreement has passed: all members know its votes."""
        self._agreed_in = self._fabric.generation

    def boundary(self, version: int, tracked: TrackedState) -> None:
        """A step begins. All members raise UsageError alike where two replicas differ."""
        self._large = tracked.extras.large
        generation = self._fabric.generation
        if self._agreed_in != generation or self._fabric.ballot.least(_VOTE) != -1:
            return
        if self._compared_in == generation and version & (version - 1):
            return
        ranks = self._fabric.ranks
        votes = [_MOST] * (2 * _WORDS * len(ranks))
        digest, names = tracked.extras.large_digest()
        at = 2 * _WORDS * ranks.index(self._fabric.rank)
        votes[at : at + 2 * _WORDS] = [*_words(tracked.replica_key().encode()), *_words(digest)]
        least = self._fabric.least(votes)
        if not least:
            return
        self._compared_in = generation
        pair = differing(least, ranks)
        if pair:
            raise UsageError(
                f"what job.track(extra=...) was given ({', '.join(names) or 'none here'}) has other values on rank"
                f" {pair[1]} than on rank {pair[0]}, which hold the same model, and is larger than {OWN_BYTES} bytes:"
                " who takes the place of one of them would get the other's",
                remedy="give values of one rank as objects of their own that stay smaller, or do not track them",
            )

    def _vote(self) -> int:
        return -int(self._large)


def differing(least: Sequence[int], ranks: Sequence[int]) -> tuple[int, int] | None:
    """Two ranks that hold the same state and have other large objects, from the least of all votes."""
    seen: dict[tuple[int, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    for place, rank in enumerate(ranks):
        row = tuple(least[2 * _WORDS * place : 2 * _WORDS * (place + 1)])
        seen[row[:_WORDS]].setdefault(row[_WORDS:], rank)
    found = [tuple(by_digest.values())[:2] for by_digest in seen.values() if len(by_digest) > 1]
    return (found[0][0], found[0][1]) if found else None


def _words(data: bytes) -> list[int]:
    """60 bits of hash, as small numbers that fit a vote."""
    number = xxhash.xxh3_64_intdigest(data)
    return [(number >> 30 * index) & ((1 << 30) - 1) for index in range(_WORDS)]
