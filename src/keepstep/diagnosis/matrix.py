"""What the slow cells of a delay matrix have in common: a node, a rank, a side, a link, or the set that fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.diagnosis.windows import Numbers
from keepstep.records.finding import Suspect

__all__ = ["Cells", "explain"]

_COMPARABLE = 0.25
"""A cell that moved less than this share of a slow cell's bytes would not show a slow side."""


@dataclass(frozen=True)
class Cells:
    """The populated cells: sending rank, receiving rank, excess in us a step (0: not slow), bytes a step."""

    sources: Numbers
    destinations: Numbers
    excess: Numbers
    sent: Numbers


def explain(cells: Cells, nodes: Mapping[int, str]) -> Iterator[tuple[tuple[Suspect, ...], list[int]]]:
    """(what cannot be told apart, the slow cells it explains) for each fault, the widest first.

    `nodes` says where each rank is. A side is to blame only where at least two cells of it are slow and none that
    moves comparably many bytes is not; where it has a single such cell, side and link cannot be told apart.
    """
    marked = cells.excess.nonzero()[0]
    if not len(marked):
        return
    slow = set(marked.tolist())
    busy = cells.sent >= _COMPARABLE * float(cells.sent[marked].max())
    leaving = _by(cells.sources, np.isin(cells.sources, cells.sources[marked]) & busy)
    entering = _by(cells.destinations, np.isin(cells.destinations, cells.destinations[marked]) & busy)
    for rank in set(cells.sources[marked].tolist()) | set(cells.destinations[marked].tolist()):
        leaving.setdefault(rank, set())
        entering.setdefault(rank, set())
    yield from _nodes(cells, slow, nodes=nodes)
    yield from _whole_ranks(slow, leaving, entering=entering)
    yield from _sides(slow, leaving, source=True)
    yield from _sides(slow, entering, source=False)
    for cell in sorted(slow):
        source, destination = int(cells.sources[cell]), int(cells.destinations[cell])
        suspects = [Suspect(link=(source, destination))]
        if len(leaving[source]) == 1:
            suspects.append(Suspect(source=source))
        if len(entering[destination]) == 1:
            suspects.append(Suspect(destination=destination))
        yield tuple(suspects), [cell]


def _by(ends: Numbers, wanted: Numbers) -> dict[int, set[int]]:
    """The wanted cells by the rank at one of their ends."""
    found: dict[int, set[int]] = defaultdict(set)
    for cell in wanted.nonzero()[0].tolist():
        found[int(ends[cell])].add(cell)
    return found


def _nodes(
    cells: Cells, slow: set[int], *, nodes: Mapping[int, str]
) -> Iterator[tuple[tuple[Suspect, ...], list[int]]]:
    """Nodes all of whose links to other nodes, in one direction at least, are slow. Takes their cells out of `slow`."""
    if len(slow) < 2 or len(set(nodes.values())) < 2:
        return
    out: dict[str, set[int]] = defaultdict(set)
    into: dict[str, set[int]] = defaultdict(set)
    ends = [[nodes.get(int(side[cell]), "") for side in (cells.sources, cells.destinations)] for cell in sorted(slow)]
    touched = {node for pair in ends for node in pair}
    there = [rank for rank, node in nodes.items() if node in touched]
    near = (np.isin(cells.sources, there) | np.isin(cells.destinations, there)) & (cells.sent > 0)
    for cell in near.nonzero()[0].tolist():
        here, beyond = (nodes.get(int(side[cell]), "") for side in (cells.sources, cells.destinations))
        if here != beyond:
            out[here].add(cell)
            into[beyond].add(cell)
    fits = {node: crossing for node, crossing in out.items() if len(crossing) > 1 and crossing <= slow}
    for node, crossing in into.items():
        if len(crossing) > 1 and crossing <= slow:
            fits[node] = crossing | fits.get(node, set())
    while fits:
        widest = max(fits.values(), key=len)
        alike = sorted(node for node, crossing in fits.items() if crossing == widest)
        yield tuple(Suspect(node=node) for node in alike), sorted(widest)
        slow -= widest
        fits = {node: rest for node, crossing in fits.items() if len(rest := crossing & slow) > 1}


def _whole_ranks(
    slow: set[int], leaving: Mapping[int, set[int]], *, entering: Mapping[int, set[int]]
) -> Iterator[tuple[tuple[Suspect, ...], list[int]]]:
    """Ranks that both send and receive slowly on all their cells (two of each at least)."""
    for rank in sorted(leaving):
        out, into = leaving[rank], entering.get(rank, set())
        if min(len(out), len(into)) > 1 and (out | into) <= slow:
            slow -= out | into
            yield (Suspect(rank=rank),), sorted(out | into)


def _sides(
    slow: set[int], by_end: Mapping[int, set[int]], *, source: bool
) -> Iterator[tuple[tuple[Suspect, ...], list[int]]]:
    for rank in sorted(by_end):
        mine = by_end[rank]
        if len(mine) > 1 and mine <= slow:
            slow -= mine
            yield (Suspect(source=rank) if source else Suspect(destination=rank),), sorted(mine)
