"""Whether replicas have the same values in extra objects that are too large to be one rank's own, and in buffers that
nobody makes alike.

An agreement says whether any member has such state. If so, all compare digests at the next boundary: once in every
generation, and after 1, 2, 4, 8, ... updates. Objects that differ end the job; buffers that differ are told once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import xxhash

from keepstep.errors import UsageError
from keepstep.training.extras import OWN_BYTES
from keepstep.training.fabric import Fabric
from keepstep.training.state import TrackedState

__all__ = ["Alike", "differing"]

_log = logging.getLogger("keepstep")

_VOTE = "replicated_by_script"
_MOST = (1 << 31) - 1
_WORDS = 2
_ROW = 3 * _WORDS
"""What a member votes: its replica key, its large objects, its buffers."""
_SPANS = 64
"""So many runs of buffers are compared to find one that differs."""


class Alike:
    """The comparison as one member sees it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._any = False
        self._told = False
        self._agreed_in = self._compared_in = -1
        fabric.ballot.add(_VOTE, self._vote)

    def agreed(self) -> None:
        """An agreement has passed: all members know its votes."""
        self._agreed_in = self._fabric.generation

    def boundary(self, version: int, tracked: TrackedState) -> None:
        """A step begins. All members raise UsageError alike where large objects differ."""
        self._any = tracked.extras.large or tracked.has_unshared_buffers
        generation = self._fabric.generation
        if self._agreed_in != generation or self._fabric.ballot.least(_VOTE) != -1:
            return
        if self._compared_in == generation and version & (version - 1):
            return
        ranks = self._fabric.ranks
        votes = [_MOST] * (_ROW * len(ranks))
        digest, names = tracked.extras.large_digest()
        key, buffers = tracked.replica_key(), tracked.unshared_buffers()
        at = _ROW * ranks.index(self._fabric.rank)
        votes[at : at + _ROW] = [*_words(key.encode()), *_words(digest), *_words(b"".join(buffers.values()))]
        least = self._fabric.least(votes)
        if not least:
            return
        self._compared_in = generation
        pair = differing(least, ranks, what=2)
        if pair:
            self._tell(pair, buffers)
        pair = differing(least, ranks, what=1)
        if pair:
            raise UsageError(
                f"what job.track(extra=...) was given ({', '.join(names) or 'none here'}) has other values on rank"
                f" {pair[1]} than on rank {pair[0]}, which hold the same model, and is larger than {OWN_BYTES} bytes:"
                " who takes the place of one of them would get the other's",
                remedy="give values of one rank as objects of their own that stay smaller, or do not track them",
            )

    def _tell(self, pair: tuple[int, int], buffers: Mapping[str, bytes]) -> None:
        """All members: find a buffer that differs between the two ranks; the first of these says so, once."""
        votes, names = [_MOST] * (2 * _SPANS), list(buffers)
        run = max(1, -(-len(names) // _SPANS))
        if self._fabric.rank in pair:
            at = _SPANS * pair.index(self._fabric.rank)
            values = list(buffers.values())
            for span in range(_SPANS):
                votes[at + span] = _words(b"".join(values[run * span : run * (span + 1)]))[0]
        least = self._fabric.least(votes)
        if self._told or not least:
            return
        self._told = True
        if self._fabric.rank != pair[0]:
            return
        span = next((at for at in range(_SPANS) if least[at] != least[_SPANS + at]), 0)
        some = names[run * span : run * (span + 1)]
        where = some[0] if len(some) == 1 else f"one of {some[0]} to {some[-1]}"
        _log.warning(
            "keepstep: a buffer (%s) has other values on rank %d than on rank %d, which hold the same model, and nobody"
            " makes such buffers alike: who takes the place of one of them goes on with the other's -> use"
            " broadcast_buffers=True or SyncBatchNorm",
            where,
            pair[1],
            pair[0],
        )

    def _vote(self) -> int:
        return -int(self._any)


def differing(least: Sequence[int], ranks: Sequence[int], *, what: int) -> tuple[int, int] | None:
    """Two ranks that hold the same state and have other large objects (`what` 1) or buffers (2), from the least of all
    votes."""
    seen: dict[tuple[int, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    for place, rank in enumerate(ranks):
        row = tuple(least[_ROW * place : _ROW * (place + 1)])
        seen[row[:_WORDS]].setdefault(row[what * _WORDS : (what + 1) * _WORDS], rank)
    found = [tuple(by_digest.values())[:2] for by_digest in seen.values() if len(by_digest) > 1]
    return (found[0][0], found[0][1]) if found else None


def _words(data: bytes) -> list[int]:
    """60 bits of hash, as small numbers that fit a vote."""
    number = xxhash.xxh3_64_intdigest(data)
    return [(number >> 30 * index) & ((1 << 30) - 1) for index in range(_WORDS)]
