"""Start-up: who never came, who came and died, and who is there but believes something else than the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from keepstep.records.finding import Finding, Suspect

__all__ = ["Arrival", "ArrivalFacts", "judge_arrivals"]

_LONGER = 1.5
_MARGIN_S = 5.0
_KILLED = 128
_BELIEFS = (("world", "number of ranks"), ("keepstep_version", "keepstep"), ("torch_version", "torch"))


class Arrival(msgspec.Struct, frozen=True):
    """How one rank started: wall-clock times in s, exit code (128 + signal), and what its hello said."""

    rank: int
    node: str
    started: float
    arrived: float | None = None
    exited: int | None = None
    world: int = 0
    keepstep_version: str = ""
    torch_version: str = ""


class ArrivalFacts(msgspec.Struct, frozen=True):
    """The starts of one attempt of a job of `world` ranks; a later one of a rank counts."""

    world: int
    ranks: tuple[Arrival, ...]


def judge_arrivals(facts: ArrivalFacts, now: float) -> tuple[Finding, ...]:
    """What is wrong with the start at `now` (wall clock, s); nothing while it may still go well.

    A rank is missed once it has taken 1.5 times as long as the slowest of those that arrived, and 5 s more, and at
    least half of the job is there: what is normal is what the others needed.
    """
    ranks = {arrival.rank: arrival for arrival in facts.ranks if 0 <= arrival.rank < facts.world}
    starts = [ranks[rank] for rank in sorted(ranks)]
    return (*_died(starts), *_disagree(starts), *_missing(starts, facts.world, now=now))


def _died(starts: Sequence[Arrival]) -> Iterator[Finding]:
    for one in starts:
        if one.exited is None or one.arrived is not None:
            continue
        how = f"signal {one.exited - _KILLED}" if one.exited > _KILLED else f"exit code {one.exited}"
        yield Finding(
            kind="startup_died",
            layer="application",
            suspects=((Suspect(rank=one.rank),),),
            victims=tuple(other.rank for other in starts if other.rank != one.rank),
            confidence=0.95,
            evidence=(f"the process of rank {one.rank} on {one.node} ended with {how} before it joined",),
            next_probe=f"the log of rank {one.rank}",
        )


def _disagree(starts: Sequence[Arrival]) -> Iterator[Finding]:
    there = [one for one in starts if one.arrived is not None]
    for name, words in _BELIEFS:
        said = {one.rank: getattr(one, name) for one in there if getattr(one, name)}
        counts = Counter(said.values()).most_common()
        if len(counts) < 2:
            continue
        clear = counts[0][1] > counts[1][1]
        usual = counts[0][0]
        odd = sorted(rank for rank, value in said.items() if value != usual)
        together = (tuple(Suspect(rank=rank) for rank in sorted(said)),)
        suspects = tuple((Suspect(rank=rank),) for rank in odd) if clear else together
        yield Finding(
            kind="startup_disagrees",
            layer="configuration",
            suspects=suspects,
            victims=tuple(rank for rank in sorted(said) if clear and rank not in odd),
            confidence=0.95 if clear else 0.7,
            evidence=tuple(f"{words} {value}: {count} of {len(said)} ranks" for value, count in counts[:4]),
            next_probe=f"environment and installation of {'these ranks' if clear else 'all ranks'}",
        )


def _missing(starts: Sequence[Arrival], world: int, *, now: float) -> Iterator[Finding]:
    took = [one.arrived - one.started for one in starts if one.arrived is not None]
    if 2 * len(took) < world or not took:
        return
    limit = _LONGER * max(took) + _MARGIN_S
    late = [one for one in starts if one.arrived is None and one.exited is None and now - one.started > limit]
    on_node: dict[str, list[int]] = defaultdict(list)
    for one in starts:
        on_node[one.node].append(one.rank)
    missing = {one.rank for one in late}
    whole = {node for node, ranks in on_node.items() if len(ranks) > 1 and missing.issuperset(ranks)}
    for node in sorted(whole):
        yield _never(
            Suspect(node=node), f"none of ranks {on_node[node]} on {node} has joined", starts=starts, took=max(took)
        )
    for one in late:
        if one.node not in whole:
            yield _never(
                Suspect(rank=one.rank), f"rank {one.rank} on {one.node} has not joined", starts=starts, took=max(took)
            )


def _never(suspect: Suspect, who: str, *, starts: Sequence[Arrival], took: float) -> Finding:
    there = tuple(one.rank for one in starts if one.arrived is not None)
    return Finding(
        kind="startup_never_arrived",
        layer="undetermined",
        suspects=((suspect,),),
        victims=there,
        confidence=0.85,
        evidence=(f"{who}; {len(there)} other ranks have joined, the slowest after {took:.1f} s",),
        next_probe="its process: is it alive, and where does its Python stack stand?",
    )
