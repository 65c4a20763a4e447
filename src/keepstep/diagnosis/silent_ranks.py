"""Ranks that reported nothing while others wait in operations of theirs."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.diagnosis.hang_words import listed, title, waiting
from keepstep.diagnosis.waiting import WaitGraph
from keepstep.records.evidence import Reporter
from keepstep.records.finding import Finding, Suspect

__all__ = ["silent_findings"]


def silent_findings(
    graph: WaitGraph, ends: Sequence[int], *, notes: dict[int, Reporter], others: bool
) -> list[Finding]:
    """One finding for each set of silent ranks that cannot be told apart.

    `ends` are operations (indices in the graph) that only silent members keep from finishing. `others`: there is an
    origin among those who reported, so that a missing report may be just that. One `undetermined` finding if most of
    the ranks, or most of a group, are silent.
    """
    if not ends:
        return []
    by_set: dict[frozenset[int], list[int]] = {}
    for index in ends:
        by_set.setdefault(frozenset(graph.blockers[index].silent), []).append(index)
    smallest = [ranks for ranks in by_set if not any(other < ranks for other in by_set)]
    sure = [ranks for ranks in smallest if not _is_most(graph, by_set[ranks])]
    if len(graph.heard) * 2 < len(graph.expected) or not sure:
        return [_too_few(graph, sorted(graph.expected - graph.heard))]
    return [_silent(graph, sorted(ranks), indices=by_set[ranks], notes=notes, others=others) for ranks in sure]


def _is_most(graph: WaitGraph, indices: list[int]) -> bool:
    """Whether more than half of the members of the group are silent."""
    blocker = graph.blockers[indices[0]]
    return blocker.group is not None and len(blocker.silent) * 2 > len(blocker.group.ranks)


def _too_few(graph: WaitGraph, silent: list[int]) -> Finding:
    return Finding(
        kind="undetermined",
        confidence=0.2,
        evidence=(
            f"only {listed(graph.heard)} reported, and they wait for {listed(silent)}",
            "with so many reports missing nobody can be singled out",
        ),
        next_probe=f"collect the reports of {listed(silent)}",
    )


def _silent(
    graph: WaitGraph, silent: list[int], *, indices: list[int], notes: dict[int, Reporter], others: bool
) -> Finding:
    evidence = [
        f"{title(graph.blockers[index])}: {waiting(graph.blockers[index].waiters)} in it" for index in indices[:4]
    ]
    evidence.append(f"nothing was reported by {listed(silent)}")
    evidence += [f"rank {rank}: {notes[rank].state}. {notes[rank].detail}" for rank in silent if rank in notes]
    if others:
        evidence.append("others are found at fault without it: its report may only be missing")
    return Finding(
        kind="reporter_silent",
        suspects=(tuple(Suspect(rank=rank) for rank in silent),),
        victims=graph.victims_of((), indices),
        confidence=0.4 if others else 0.7 if len(silent) == 1 else 0.5,
        evidence=tuple(evidence),
        next_probe=f"are the processes and hosts of {listed(silent)} alive? Their reports and stacks",
    )
