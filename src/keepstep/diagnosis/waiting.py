"""Who waits for whom: a graph of ranks and of the operations that block them.

Every rank that has unfinished operations is blocked by its oldest one. An operation waits for each of its members that
is not there: it has not queued the operation, or it is blocked by another, older one. Where the graph ends is the
origin; everybody who can reach it is a victim. Built in time near linear in the number of positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from keepstep.diagnosis.group_progress import is_rooted
from keepstep.records.evidence import GroupProgress, Position, Transfer, TransferCount

__all__ = ["Blocker", "WaitGraph", "is_lost_between_two", "wait_graph"]

_MOST_FRONTIERS = 16
"""Different oldest operations of one group that are looked at one by one; a hang has few."""

_UNKNOWN = -(1 << 62)


@dataclass(slots=True)
class Blocker:
    """One operation that blocks somebody: a collective of a group, or a transfer between two ranks."""

    group: GroupProgress | None
    sequence: int
    transfer: Transfer | None = None
    waiters: list[int] = field(default_factory=list)
    """Ranks whose oldest unfinished operation it is."""
    missing: list[int] = field(default_factory=list)
    """Members that have not queued it."""
    elsewhere: list[int] = field(default_factory=list)
    """Members that have queued it and are blocked by an older operation."""
    passed: list[int] = field(default_factory=list)
    """Members that have finished it."""
    silent: list[int] = field(default_factory=list)
    """Members that reported nothing at all."""
    perhaps: list[int] = field(default_factory=list)
    """Those of `missing` that finished transfers like this one; whether this one is among them is not known."""


@dataclass(slots=True)
class WaitGraph:
    """The graph, and its ends."""

    blockers: list[Blocker]
    blocked_by: dict[int, list[int]]
    """Rank to indices in `blockers`."""
    stuck: dict[int, int]
    """Ranks that have not finished what all others of the operation have: rank to index in `blockers`."""
    ends: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Strongly connected parts with no way out that somebody waits for: (ranks, indices in `blockers`)."""
    heard: set[int] = field(default_factory=set)
    """Ranks that reported how far they are in some group, or a transfer."""
    expected: set[int] = field(default_factory=set)
    """All ranks that are members of a group or ends of a transfer."""
    _arrows: list[tuple[int, int]] = field(default_factory=list)
    _nodes: dict[int, int] = field(default_factory=dict)

    def victims_of(self, ranks: Iterable[int], blockers: Iterable[int] = ()) -> tuple[int, ...]:
        """Ranks that wait, directly or through others, for these ranks or operations; without these ranks, sorted."""
        backwards: dict[int, list[int]] = defaultdict(list)
        for tail, head in self._arrows:
            backwards[head].append(tail)
        offset = len(self._nodes)
        ranks = list(ranks)
        todo = [self._nodes[rank] for rank in ranks if rank in self._nodes] + [offset + index for index in blockers]
        seen = set(todo)
        while todo:
            for tail in backwards[todo.pop()]:
                if tail not in seen:
                    seen.add(tail)
                    todo.append(tail)
        named = {node: rank for rank, node in self._nodes.items()}
        return tuple(sorted({named[node] for node in seen if node < offset} - set(ranks)))


class _Ends:
    """What the two ends of transfers have queued and finished."""

    def __init__(self, transfers: list[Transfer], counts: Iterable[TransferCount]) -> None:
        self.oldest: dict[tuple[int, int, int], Transfer] = {}
        for one in transfers:
            self.oldest.setdefault((one.rank, one.source, one.destination), one)
        self._finished = {(one.rank, one.source, one.destination, one.group): one for one in counts}
        self.ranks = {one.rank for one in self.oldest.values()} | {one.rank for one in self._finished.values()}

    def has_finished(self, rank: int, transfer: Transfer, *, waiters: list[int]) -> bool | None:
        """Whether `rank` has finished the transfer in which the other end waits; None if that cannot be told."""
        ends = transfer.source, transfer.destination
        waiting = next((self.oldest[(one, *ends)] for one in waiters if (one, *ends) in self.oldest), transfer)
        count = self._finished.get((rank, *ends, waiting.group))
        if count is None:
            return False
        if waiting.ordinal is None or not count.from_start:
            return None
        return count.finished >= waiting.ordinal


def wait_graph(
    groups: Sequence[GroupProgress], transfers: Iterable[Transfer] = (), *, counts: Iterable[TransferCount] = ()
) -> WaitGraph:
    """The graph for merged `groups` (see group_progress.merged), the unfinished `transfers`, and counts of finished."""
    transfers = list(transfers)
    ends = _Ends(transfers, counts)
    heard = {position.rank for group in groups for position in group.positions if position.queued is not None}
    heard.update(ends.ranks)
    blockers, blocked_by = _oldest(groups, transfers)
    expected = heard.union(*(group.ranks for group in groups), *((one.source, one.destination) for one in transfers))
    graph = WaitGraph(blockers, blocked_by, {}, heard=heard, expected=expected)
    for index, blocker in enumerate(blockers):
        _fill(graph, index, blocker=blocker, ends=ends)
    _wait_for_the_unmet(graph)
    for index, blocker in enumerate(blockers):
        _mark_stuck(graph, index, blocker=blocker)
    if not all(_is_ending(blocker) for blocker in blockers):
        _find_ends(graph)
        graph.ends = _with_batches_whole(graph)
    return graph


def _oldest(groups: Sequence[GroupProgress], transfers: list[Transfer]) -> tuple[list[Blocker], dict[int, list[int]]]:
    """The operations that block, and which of them block each rank: its oldest, or all where the times are unknown."""
    candidates: dict[int, list[tuple[float | None, tuple[int, int, int]]]] = defaultdict(list)
    for number, group in enumerate(groups):
        for position, sequence in _unfinished(group):
            candidates[position.rank].append((position.waiting_since, (number, sequence, -1)))
    for transfer in transfers:
        candidates[transfer.rank].append((transfer.queued, (-1, transfer.source, transfer.destination)))
    index_of: dict[tuple[int, int, int], int] = {}
    blockers: list[Blocker] = []
    blocked_by: dict[int, list[int]] = {}
    example = {(transfer.source, transfer.destination): transfer for transfer in transfers}
    for rank, mine in candidates.items():
        chosen = [key for since, key in mine]
        if len(mine) > 1 and all(since is not None for since, _ in mine):
            first = min(since for since, _ in mine if since is not None)
            chosen = [key for since, key in mine if since == first]
        for key in dict.fromkeys(chosen):
            if key not in index_of:
                index_of[key] = len(blockers)
                number, sequence, _ = key
                collective = number >= 0
                blockers.append(
                    Blocker(groups[number], sequence) if collective else Blocker(None, 0, example[(key[1], key[2])])
                )
            blockers[index_of[key]].waiters.append(rank)
            blocked_by.setdefault(rank, []).append(index_of[key])
    return blockers, blocked_by


def _unfinished(group: GroupProgress) -> Iterable[tuple[Position, int]]:
    """Positions that wait for something, with the sequence of the oldest thing they wait for."""
    known = [position.queued for position in group.positions if position.queued is not None]
    lowest = min(known, default=0)
    frontiers: set[int] = set()
    waiting = []
    for position in group.positions:
        if position.queued is None:
            continue
        finished = lowest if position.finished is None else position.finished
        if position.queued > finished + (1 if group.snapshot else 0):
            waiting.append((position, finished + 1))
            frontiers.add(finished + 1)
    if len(frontiers) > _MOST_FRONTIERS:
        limit = sorted(frontiers)[_MOST_FRONTIERS - 1]
        return [(position, min(sequence, limit)) for position, sequence in waiting]
    return waiting


def _fill(graph: WaitGraph, index: int, *, blocker: Blocker, ends: _Ends) -> None:
    """Sort the members of the operation into those who are there and those who are not, each for its reason."""
    if blocker.group is None:
        _fill_transfer(graph, index, blocker=blocker, ends=ends)
        return
    ranks, queued, finished, started = _table(blocker.group)
    seen, sequence = set(ranks.tolist()), _bounded(blocker.sequence)
    blocker.missing = ranks[queued < sequence].tolist()
    blocker.passed = ranks[finished >= sequence].tolist()
    undecided = (queued >= sequence) & (finished < sequence) & (started < sequence)
    blocker.elsewhere = [rank for rank in ranks[undecided].tolist() if index not in graph.blocked_by.get(rank, [])]
    for rank in blocker.group.ranks:
        if rank not in seen:
            (blocker.missing if rank in graph.heard else blocker.silent).append(rank)


def _table(group: GroupProgress) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ranks of the group that reported, and their newest queued, finished and started sequence, as arrays."""
    positions = [position for position in group.positions if position.queued is not None]
    unknown_finish = min((position.queued or 0 for position in positions), default=0)

    def column(values: Iterable[int | None], default: int) -> np.ndarray:
        return np.fromiter((default if value is None else _bounded(value) for value in values), dtype=np.int64)

    return (
        column((position.rank for position in positions), 0),
        column((position.queued for position in positions), _UNKNOWN),
        column((position.finished for position in positions), unknown_finish),
        column((position.started for position in positions), _UNKNOWN),
    )


def _bounded(value: int) -> int:
    """The number as far as 63 bits hold it: damaged dumps and counters that wrapped have larger ones."""
    return max(_UNKNOWN, min(value, -_UNKNOWN))


def _fill_transfer(graph: WaitGraph, index: int, *, blocker: Blocker, ends: _Ends) -> None:
    transfer = blocker.transfer
    assert transfer is not None
    for rank in (transfer.source, transfer.destination):
        if index in graph.blocked_by.get(rank, []):
            continue
        if rank not in graph.heard:
            blocker.silent.append(rank)
        elif (rank, transfer.source, transfer.destination) in ends.oldest:
            blocker.elsewhere.append(rank)
        elif (done := ends.has_finished(rank, transfer, waiters=blocker.waiters)) is True:
            blocker.passed.append(rank)
        else:
            blocker.missing.append(rank)
            blocker.perhaps += [rank] if done is None else []


def _mark_stuck(graph: WaitGraph, index: int, *, blocker: Blocker) -> None:
    """Waiters of an operation that all have queued and most have finished: what holds them is their own."""
    if not blocker.passed or blocker.missing or blocker.silent or blocker.group is None:
        return
    if is_lost_between_two(blocker):
        return
    if len(blocker.waiters) + len(blocker.elsewhere) > max(1, len(blocker.passed)):
        return
    if _is_rooted(blocker) and len(blocker.passed) < len(blocker.group.positions) - 1:
        return
    for rank in blocker.waiters:
        graph.stuck[rank] = index


def is_lost_between_two(blocker: Blocker) -> bool:
    """Whether it is the newest collective that one of two members finished, while the other still waits in it.

    Bytes that were swallowed on their way look like that: their sender has done its part, and no later collective can
    end. A device that stopped may look the same. If its peer has finished later ones, those passed the same way.
    """
    group = blocker.group
    return (
        group is not None
        and group.members_known
        and len(group.ranks) == 2
        and len(blocker.passed) == len(blocker.waiters) == 1
        and not (blocker.missing or blocker.silent)
        and max(position.finished or 0 for position in group.positions) == blocker.sequence
    )


def _is_ending(blocker: Blocker) -> bool:
    """Whether the operation is the newest of its group, all have called it and some have finished it.

    If every operation that blocks anybody is like that, the job was seen in the middle of it, and nothing stands still.
    """
    if blocker.group is None or not blocker.passed or blocker.missing or blocker.silent:
        return False
    return blocker.sequence >= max(position.queued or 0 for position in blocker.group.positions)


def _is_rooted(blocker: Blocker) -> bool:
    assert blocker.group is not None
    for position in blocker.group.positions:
        signature = position.signatures.get(blocker.sequence)
        if signature is not None:
            return is_rooted(signature)
    return False


def _find_ends(graph: WaitGraph) -> None:
    """Fill `ends`: parts of the graph with no way out that somebody waits for, or that are stuck by themselves."""
    ranks = set(graph.blocked_by)
    for blocker in graph.blockers:
        ranks.update(blocker.missing, blocker.elsewhere)
    graph._nodes = {rank: number for number, rank in enumerate(sorted(ranks))}
    offset = len(graph._nodes)
    arrows = [
        (graph._nodes[rank], offset + index)
        for rank, indices in graph.blocked_by.items()
        if rank not in graph.stuck
        for index in indices
    ]
    for index, blocker in enumerate(graph.blockers):
        arrows += [(offset + index, graph._nodes[rank]) for rank in (*blocker.missing, *blocker.elsewhere)]
    graph._arrows = arrows
    size = offset + len(graph.blockers)
    if not size:
        return
    tails, heads = (np.array([arrow[end] for arrow in arrows], dtype=np.int64) for end in (0, 1))
    matrix = coo_array((np.ones(len(arrows), dtype=np.int8), (tails, heads)), shape=(size, size))
    count, part = connected_components(matrix.tocsr(), directed=True, connection="strong")
    leaves = np.ones(count, dtype=bool)
    reached = np.zeros(count, dtype=bool)
    if arrows:
        crossing = part[tails] != part[heads]
        leaves[part[tails[crossing]]] = False
        reached[part[heads]] = True
    for rank in graph.stuck:
        reached[part[graph._nodes[rank]]] = True
    members: dict[int, tuple[list[int], list[int]]] = {}
    named = sorted(graph._nodes)
    for node in np.flatnonzero(leaves[part] & reached[part]).tolist():
        found = members.setdefault(int(part[node]), ([], []))
        found[0 if node < offset else 1].append(named[node] if node < offset else node - offset)
    graph.ends = list(members.values())


def _is_met(blocker: Blocker) -> bool:
    """Whether it is a transfer in which both ends wait."""
    return blocker.transfer is not None and not (blocker.missing or blocker.elsewhere or blocker.silent)


def _wait_for_the_unmet(graph: WaitGraph) -> None:
    """A rank that gave several transfers as one batch waits for the other ends that did not come.

    None of a batch counts as finished before all of it is. So in those transfers to which both ends came, such a rank
    is `elsewhere`: whoever waits in them waits for its batch.
    """
    todo = [index for index, one in enumerate(graph.blockers) if one.transfer is not None and not _is_met(one)]
    while todo:
        index = todo.pop()
        for rank in graph.blockers[index].waiters:
            for other in list(graph.blocked_by[rank]):
                if other != index and _is_met(graph.blockers[other]):
                    graph.blocked_by[rank].remove(other)
                    graph.blockers[other].waiters.remove(rank)
                    graph.blockers[other].elsewhere.append(rank)
                    todo.append(other)


def _with_batches_whole(graph: WaitGraph) -> list[tuple[list[int], list[int]]]:
    """The ends of the graph, with transfers that are of one batch as one end: which of them holds it is not known."""
    home: dict[int, int] = {}
    found: list[tuple[list[int], list[int]]] = []
    for ranks, blockers in graph.ends:
        waiters = [
            rank for index in blockers if _is_met(graph.blockers[index]) for rank in graph.blockers[index].waiters
        ]
        if ranks or not waiters:
            found.append((ranks, blockers))
            continue
        same = sorted({home[rank] for rank in waiters if rank in home})
        number = same[0] if same else len(found)
        if not same:
            found.append(([], []))
        for other in same[1:]:
            found[number][1].extend(found[other][1])
            found[other][1].clear()
            home.update((rank, number) for rank, at in home.items() if at == other)
        found[number][1].extend(blockers)
        home.update((rank, number) for rank in waiters)
    return [end for end in found if end[0] or end[1]]
