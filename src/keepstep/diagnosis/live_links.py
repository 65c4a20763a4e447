"""Links that pass no more bytes: a member inside a collective that waits for a peer is not what holds the job up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from keepstep.diagnosis.live_state import Watch
from keepstep.records.finding import Finding, Suspect

__all__ = ["dead_links", "held_by_links", "waited_for"]

_LONG_US = 300_000


def held_by_links(watch: Watch, finding: Finding, *, ranks: Sequence[int]) -> Finding | None:
    """The hang of `ranks` as one of their links, where all of them are inside a call; None where one is not.

    Their peers may have finished the call: what they wrote last is in some buffer and never arrives.
    """
    links = waited_for(watch, ranks)
    if links is None:
        return None
    suspects = tuple(_set(watch, link) for link in links) or tuple((Suspect(rank=rank),) for rank in ranks)
    inside = ", ".join(map(str, ranks))
    return msgspec.structs.replace(
        finding,
        kind="communication_hang",
        layer="hardware_link" if links else "undetermined",
        suspects=suspects,
        confidence=0.85 if len(links) == 1 else 0.65,
        evidence=(
            f"rank {inside} is inside the call: its peers have done their part, and it waits",
            *(f"no more bytes pass from rank {source} to rank {target}" for source, target in links[:4]),
            *(line for line in finding.evidence if "stopped working" not in line),
        ),
        next_probe="; ".join(f"transfer from rank {source} to rank {target}" for source, target in links[:4])
        or f"where the call of rank {inside} waits: counters of its links",
    )


def waited_for(watch: Watch, ranks: Sequence[int]) -> list[tuple[int, int]] | None:
    """The links, as (from, to), that `ranks` wait for inside a call; None where one of them is in none."""
    links: list[tuple[int, int]] = []
    for rank in ranks:
        seen = watch.seen.get(rank)
        if seen is None or seen.progress is None or not any(mark.open_us for mark in seen.progress.groups):
            return None
        for peer, wait in seen.waits.items():
            if peer >= 0 and wait.wait_peer_us > _LONG_US:
                links.append((peer, rank))
            if peer >= 0 and wait.wait_credit_us + wait.wire_us > _LONG_US:
                links.append((rank, peer))
    return links


def dead_links(watch: Watch, finding: Finding, *, stuck: Sequence[tuple[int, int]], involved: set[int]) -> Finding:
    """A call that nobody finishes, with the links whose sender holds bytes back that the receiver waits for."""
    ends = {rank for pair in stuck for rank in pair}
    return msgspec.structs.replace(
        finding,
        layer="hardware_link",
        suspects=tuple((Suspect(link=pair),) for pair in stuck),
        victims=tuple(sorted(involved - ends)),
        confidence=0.9 if len(stuck) == 1 else 0.8,
        evidence=(
            *(f"rank {a} has bytes for rank {b} that do not leave, and {b} waits for them" for a, b in stuck[:4]),
            *finding.evidence[:1],
        ),
        next_probe="; ".join(f"transfer from rank {a} to rank {b}" for a, b in stuck[:4]),
    )


def _set(watch: Watch, link: tuple[int, int]) -> tuple[Suspect, ...]:
    """The link, and the sides that have no other link to clear them."""
    source, destination = link
    leaving = int(np.count_nonzero(watch.pairs.ranks == source))
    entering = int(np.count_nonzero(watch.pairs.peers == destination))
    sides = [Suspect(source=source)] if leaving <= 1 else []
    sides += [Suspect(destination=destination)] if entering <= 1 else []
    return (Suspect(link=link), *sides)
