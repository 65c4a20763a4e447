"""Agents and members of whom nothing is heard: that is a finding of its own, not a hang of theirs."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.diagnosis.live_state import Verdict, Watch
from keepstep.records.finding import Finding, Suspect

__all__ = ["SILENT_S", "silence_verdicts", "silent_ranks"]

SILENT_S = 4.0
"""An agent says something of each member at least twice a second; so long without a word is silence."""

_ALIVE_S = 2.0


def _silent_nodes(watch: Watch, now: float) -> set[str]:
    """Nodes that say nothing although others do."""
    if not any(now - heard < _ALIVE_S for heard in watch.nodes.values()):
        return set()
    return {node for node, heard in watch.nodes.items() if now - heard > SILENT_S}


def silent_ranks(watch: Watch, now: float) -> set[int]:
    """Ranks of which nothing is heard while something is heard of others."""
    if not any(now - heard < _ALIVE_S for heard in watch.nodes.values()):
        return set()
    return {rank for rank, seen in watch.seen.items() if now - seen.heard > SILENT_S and rank not in watch.retired}


def silence_verdicts(watch: Watch, now: float) -> Iterator[Verdict]:
    """One verdict for each silent node, and for each silent member of a node that speaks."""
    nodes = _silent_nodes(watch, now)
    silent = silent_ranks(watch, now)
    for node in sorted(nodes):
        ranks = sorted(rank for rank in silent if watch.seen[rank].node == node)
        if ranks:
            yield _verdict(f"silent:{node}", Suspect(node=node), ranks=ranks, heard=now - watch.nodes[node])
    for rank in sorted(silent):
        if watch.seen[rank].node not in nodes:
            yield _verdict(f"silent:{rank}", Suspect(rank=rank), ranks=[rank], heard=now - watch.seen[rank].heard)


def _verdict(key: str, suspect: Suspect, *, ranks: list[int], heard: float) -> Verdict:
    who = f"node {suspect.node}, with ranks {ranks[:8]}" if suspect.node is not None else f"rank {suspect.rank}"
    finding = Finding(
        kind="reporter_silent",
        suspects=((suspect,),),
        confidence=0.8,
        evidence=(f"nothing was heard of {who} for {heard:.0f} s while others report",),
        next_probe="are the agent and the host alive? What its ranks do can only be seen there",
    )
    return Verdict(key=key, finding=finding)
