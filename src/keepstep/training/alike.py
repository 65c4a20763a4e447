"""Whether replicas have the same values in extra objects that are too large to be one rank's own, and in buffers that
nobody makes alike.

An agreement says whether any member has such state. If so, all compare digests at the next boundary: once in every
generation, and after 1, 2, 4, 8, ... updates. Objects that differ end the job; buffers that differ are told once, and
are each rank's own from then on.
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
_SPANS = 512
"""So many runs of buffers are compared to find those that differ."""


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
        for pair in differing(least, ranks, what=2):
            mine = _row(least, ranks.index(pair[0]))[:_WORDS] == tuple(votes[at : at + _WORDS])
            self._keep_apart(pair, tracked, buffers=buffers if mine else {})
        objects = differing(least, ranks, what=1)
        if objects:
            pair = objects[0]
            raise UsageError(
                f"what job.track(extra=...) was given ({', '.join(names) or 'none here'}) has other values on rank"
                f" {pair[1]} than on rank {pair[0]}, which hold the same model, and is larger than {OWN_BYTES} bytes:"
                " who takes the place of one of them would get the other's",
                remedy="give values of one rank as objects of their own that stay smaller, or do not track them",
            )

    def _keep_apart(self, pair: tuple[int, int], tracked: TrackedState, *, buffers: Mapping[str, bytes]) -> None:
        """All members: those that hold the model of `pair` find out which of their `buffers` differ. These are each
        rank's own from here on, and the first of the two says so, once."""
        votes, names = [_MOST] * (2 * _SPANS), list(buffers)
        run = max(1, -(-len(names) // _SPANS))
        spans = [names[at : at + run] for at in range(0, len(names), run)]
        for place, span in enumerate(spans):
            number, _ = _words(b"".join(buffers[name] for name in span))
            votes[place], votes[_SPANS + place] = number, -number
        least = self._fabric.least(votes)
        if not least:
            return
        told, self._told = self._told, True
        apart = [span for place, span in enumerate(spans) if least[place] != -least[_SPANS + place]]
        if not apart:
            return
        tracked.own_buffers.note(name for span in apart for name in span)
        if told or self._fabric.rank != pair[0]:
            return
        first = apart[0]
        _log.warning(
            "keepstep: a buffer (%s) has other values on rank %d than on rank %d, which hold the same model, and nobody"
            " makes such buffers alike: %s -> use broadcast_buffers=True or SyncBatchNorm",
            first[0] if len(first) == 1 else f"one of {first[0]} to {first[-1]}",
            pair[1],
            pair[0],
            "each rank keeps its own, also where another process takes its place"
            if tracked.own_buffers.small
            else f"they are more than {OWN_BYTES} bytes, so who takes the place of a rank goes on with another's",
        )

    def _vote(self) -> int:
        return -int(self._any)


def differing(least: Sequence[int], ranks: Sequence[int], *, what: int) -> list[tuple[int, int]]:
    """Two ranks of each state of which members have other large objects (`what` 1) or buffers (2), from the least of
    all votes."""
    seen: dict[tuple[int, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    for place, rank in enumerate(ranks):
        row = _row(least, place)
        seen[row[:_WORDS]].setdefault(row[what * _WORDS : (what + 1) * _WORDS], rank)
    found = [tuple(by_digest.values()) for by_digest in seen.values() if len(by_digest) > 1]
    return [(first, second) for first, second, *_ in found]


def _row(least: Sequence[int], place: int) -> tuple[int, ...]:
    """What the member at `place` has voted."""
    return tuple(least[_ROW * place : _ROW * (place + 1)])


def _words(data: bytes) -> list[int]:
    """60 bits of hash, as small numbers that fit a vote."""
    number = xxhash.xxh3_64_intdigest(data)
    return [(number >> 30 * index) & ((1 << 30) - 1) for index in range(_WORDS)]
