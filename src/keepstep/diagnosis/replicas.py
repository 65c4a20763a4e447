"""Replicas that hold the same state must stay equal: whose weights left the others."""

from __future__ import annotations

from collections import Counter

import msgspec

from keepstep.records.finding import Finding, Suspect
from keepstep.records.messages import StateDigest

__all__ = ["ReplicaCheck", "ReplicaNews"]

_MOST_VERSIONS = 4
_MOST_EQUAL = 8
_MOST_REPLICAS = 65536


class ReplicaNews(msgspec.Struct, frozen=True):
    """A finding about one set of replicas: `key` names it through its life, `status` is new, updated or ended."""

    key: str
    status: str
    finding: Finding


class _Set(msgspec.Struct):
    """What the members of one replica said: digests by version and rank; at which versions they agreed; what stands."""

    said: dict[int, dict[int, str]] = {}
    equal: list[int] = []
    standing: Finding | None = None


class ReplicaCheck:
    """Compares digests as they come in. Replicas that were never equal are none of ours and not reported."""

    def __init__(self) -> None:
        self._sets: dict[str, _Set] = {}

    def note(self, fact: StateDigest) -> ReplicaNews | None:
        """Take one digest; what is new about its replica, if anything is."""
        if fact.replica not in self._sets and len(self._sets) >= _MOST_REPLICAS:
            return None
        known = self._sets.setdefault(fact.replica, _Set())
        digests = known.said.setdefault(fact.version, {})
        digests[fact.rank] = fact.digest
        for old in sorted(known.said)[:-_MOST_VERSIONS]:
            del known.said[old]
        if len(digests) < 2:
            return None
        if len(set(digests.values())) == 1:
            return self._agreed(known, fact)
        return self._differ(known, fact, digests=digests)

    def _agreed(self, known: _Set, fact: StateDigest) -> ReplicaNews | None:
        known.equal = [*(version for version in known.equal if version != fact.version), fact.version][-_MOST_EQUAL:]
        if known.standing is None or len(known.said[fact.version]) < len(known.standing.victims) + _named(
            known.standing
        ):
            return None
        finding, known.standing = known.standing, None
        return ReplicaNews(_key(fact), "ended", finding)

    def _differ(self, known: _Set, fact: StateDigest, *, digests: dict[int, str]) -> ReplicaNews | None:
        known.equal = [version for version in known.equal if version != fact.version]
        before_it = [version for version in known.equal if version < fact.version]
        if not before_it:
            return None
        finding = _divergence(digests, version=fact.version, equal=max(before_it))
        before, known.standing = known.standing, finding
        if before is not None and before.suspects == finding.suspects:
            return None
        return ReplicaNews(_key(fact), "updated" if before else "new", finding)


def _key(fact: StateDigest) -> str:
    return f"replicas:{fact.replica}"


def _named(finding: Finding) -> int:
    return sum(len(suspects) for suspects in finding.suspects)


def _divergence(digests: dict[int, str], *, version: int, equal: int) -> Finding:
    """The minority is at fault; without a majority it is one of all."""
    (most, votes), *rest = Counter(digests.values()).most_common()
    others = sorted(rank for rank, digest in digests.items() if digest != most)
    clear = votes > sum(count for _, count in rest)
    ranks = others if clear else sorted(digests)
    sets = tuple((Suspect(rank=rank),) for rank in ranks) if clear else (tuple(Suspect(rank=rank) for rank in ranks),)
    evidence = [f"weights of replicas {', '.join(map(str, sorted(digests)))} were equal at version {equal}"]
    evidence += [f"rank {rank} at version {version}: {digests[rank]}" for rank in sorted(digests)[:16]]
    if not clear:
        evidence.append("as many say one thing as another: the set cannot be split by counting")
    return Finding(
        kind="state_divergence",
        layer="undetermined",
        suspects=sets,
        victims=tuple(sorted(set(digests) - set(ranks))),
        confidence=0.99,
        evidence=tuple(evidence),
        next_probe="" if clear else "run a memory test on both devices, or compare with a checkpoint of that version",
        step=version,
    )
