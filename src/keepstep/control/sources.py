"""Which replicas a joiner takes its state from, and which of them cannot be trusted."""

from __future__ import annotations

from collections import Counter

import msgspec

from keepstep.control.outcome import divergence_finding
from keepstep.control.roster import Member
from keepstep.control.turn import Turn

__all__ = ["Sources", "choose_sources", "name_diverged", "outvoted"]


class Sources(msgspec.Struct, frozen=True):
    """`ranks` that hold the state with `digest`; none where no replica is left or none can be trusted."""

    ranks: tuple[int, ...]
    digest: str


def choose_sources(stayers: list[Member], joiner: Member) -> Sources:
    """Ranks that hold the joiner's state with the digest most of them share; none without a majority's lead."""
    holders = [m for m in stayers if m.replica == joiner.replica]
    bad = outvoted(holders)
    good = [m for m in holders if m not in bad]
    return Sources(tuple(m.rank for m in good), good[0].digest) if good else Sources((), "")


def outvoted(holders: list[Member]) -> list[Member]:
    """Those of `holders` whose digest is not the one that most share; all of them if there is no such digest."""
    counts = Counter(m.digest for m in holders).most_common()
    if len(counts) < 2:
        return []
    tie = counts[0][1] == counts[1][1]
    return [m for m in holders if tie or m.digest != counts[0][0]]


def name_diverged(turn: Turn, stayers: list[Member]) -> None:
    """Say once in a change which replicas differ from the others."""
    change = turn.state.change
    assert change is not None
    for replica in sorted({member.replica for member in stayers}):
        for member in outvoted([m for m in stayers if m.replica == replica]):
            if member.name not in change.diverged:
                change = turn.change(diverged=change.diverged | {member.name})
                turn.findings.append(divergence_finding(turn, member))
                turn.because(f"state_divergence: rank {member.rank} differs from its replicas and is not used")
