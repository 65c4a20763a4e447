"""Failure domains: which nodes are lost together, and what is placed so that one loss does not take all of it.

A domain is written KIND=LABEL (`rack=r7`); every node is a domain of its own (`node=n3`). All functions here are pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

__all__ = [
    "KINDS",
    "Domains",
    "domain_name",
    "everywhere",
    "joint",
    "mirror_gaps",
    "mirror_holders",
    "standby_order",
]

KINDS = ("node", "rack", "switch", "power", "release")
"""The kinds keepstep knows of itself; a person may name others."""


class Domains(msgspec.Struct, frozen=True):
    """`labels` gives for each node its label of each kind: `{"n3": {"rack": "r7", "power": "b"}}`."""

    labels: dict[str, dict[str, str]] = {}

    def of(self, node: str) -> frozenset[str]:
        """The domains `node` is in, its own among them; a node nobody labelled is in no other."""
        named = {domain_name(kind, label) for kind, label in self.labels.get(node, {}).items() if label}
        return frozenset(named | {domain_name("node", node)})

    def nodes_in(self, domain: str, nodes: Iterable[str]) -> tuple[str, ...]:
        """Those of `nodes` that `domain` takes with it, sorted."""
        return tuple(sorted(node for node in set(nodes) if domain in self.of(node)))

    def shared(self, a: str, b: str) -> frozenset[str]:
        """The domains that nodes `a` and `b` are both in; equal nodes share all of theirs."""
        return self.of(a) & self.of(b)

    def with_labels(self, node: str, labels: Mapping[str, str]) -> Domains:
        """A copy in which `node` has `labels` too; they win over what it had."""
        return Domains({**self.labels, node: {**self.labels.get(node, {}), **labels}})


def domain_name(kind: str, label: str) -> str:
    """The domain as it is written: KIND=LABEL."""
    return f"{kind}={label}"


def joint(domains: Domains, nodes: Iterable[str]) -> frozenset[str]:
    """The domains that hold all of `nodes`; none for no nodes."""
    sets = [domains.of(node) for node in set(nodes)]
    return frozenset.intersection(*sets) if sets else frozenset()


def everywhere(domains: Domains, nodes: Iterable[str]) -> frozenset[str]:
    """The domains that hold all of `nodes`, several of them: no placement on these nodes survives their loss."""
    distinct = set(nodes)
    return joint(domains, distinct) if len(distinct) > 1 else frozenset()


# ---------------------------------------------------------------- mirrors


def mirror_holders(
    ranks_by_node: Mapping[str, Sequence[int]], domains: Domains, *, previous: Mapping[int, int] | None = None
) -> dict[int, int]:
    """For each rank the rank whose process holds its mirror; ranks that have no other rank at all are not in it.

    First, a rank and its holder share as few domains as the nodes allow (domains that hold all nodes do not count);
    they share a node only if there is one node. Second, the most mirrors that one rank holds is the least possible.
    Third, what `previous` said is kept as far as this allows. Equal arguments give an equal answer, whatever the order
    of nodes and ranks. The holders are found as a matching of ranks to ranks with augmenting paths (H. W. Kuhn 1955),
    with room for one mirror each at first, and for one more as long as some rank finds no place.
    """
    ranks = {node: tuple(sorted(some)) for node, some in sorted(ranks_by_node.items()) if some}
    if len(ranks) == 1:  # then every rank is as good as any other: each stands for a node of its own
        ranks = {str(rank): (rank,) for some in ranks.values() for rank in some}
        domains = Domains()
    placing = _Placing(ranks, domains)
    placing.keep(previous or {})
    return placing.fill()


class _Placing:
    """One matching under way: `holder` of each rank, the ranks `held` by each, `room` for each."""

    def __init__(self, ranks: dict[str, tuple[int, ...]], domains: Domains) -> None:
        self.ranks = ranks
        self.node = {rank: node for node, some in ranks.items() for rank in some}
        self.allowed = _allowed_nodes(tuple(ranks), domains)
        self.holder: dict[int, int] = {}
        self.held: dict[int, list[int]] = {rank: [] for rank in self.node}
        self.room = 1
        self.wish: dict[int, int] = {}
        self.dead: set[str] = set()

    def keep(self, previous: Mapping[int, int]) -> None:
        """Note what should stay as it was: pairs of ranks that are still there, on nodes that still suit."""
        for rank, holder in sorted(previous.items()):
            if self._may_hold(rank, holder):
                self.wish[rank] = holder

    def fill(self) -> dict[int, int]:
        """Place every rank; room grows until all are placed."""
        left = sorted(self.node)
        while left:
            self.dead = set()
            for rank in left:
                wish = self.wish.get(rank, -1)
                if wish >= 0 and len(self.held[wish]) < self.room:
                    self._put(rank, wish)
            left = [rank for rank in left if rank not in self.holder and not self._place(rank)]
            left = [rank for rank in left if self.allowed[self.node[rank]]]
            self.room += 1
        return dict(sorted(self.holder.items()))

    def _may_hold(self, rank: int, holder: int) -> bool:
        known = rank in self.node and holder in self.node and rank != holder
        return known and self.node[holder] in self.allowed[self.node[rank]]

    def _put(self, rank: int, holder: int) -> None:
        old = self.holder.get(rank)
        if old is not None:
            self.held[old].remove(rank)
        self.holder[rank] = holder
        self.held[holder].append(rank)

    def _free(self, node: str) -> int | None:
        """The rank on `node` with the fewest mirrors that has room for one more."""
        ranks = [one for one in self.ranks[node] if len(self.held[one]) < self.room]
        return min(ranks, key=lambda one: (len(self.held[one]), one), default=None)

    def _place(self, rank: int) -> bool:
        """Find `rank` a holder, moving others on where that makes room; False, and nothing changed, if none can be.

        The search goes over nodes: `came` says for each node reached which rank would go there. What a search without
        success has reached leads nowhere until room grows.
        """
        for node in self.allowed[self.node[rank]]:  # what the search would find first
            holder = self._free(node)
            if holder is not None:
                self._put(rank, holder)
                return True
        came: dict[str, int] = {}
        waiting = deque(self._reach(rank, came))
        while waiting:
            node = waiting.popleft()
            if self._free(node) is not None:
                self._shift(node, came)
                return True
            for holder in self.ranks[node]:
                for other in self.held[holder]:
                    waiting.extend(self._reach(other, came))
        self.dead.update(came)
        return False

    def _reach(self, rank: int, came: dict[str, int]) -> list[str]:
        new = [node for node in self.allowed[self.node[rank]] if node not in came and node not in self.dead]
        came.update(dict.fromkeys(new, rank))
        return new

    def _shift(self, node: str, came: dict[str, int]) -> None:
        """Put the rank that reached `node` there, the one that reached the place it leaves there, and so on."""
        while True:
            rank = came[node]
            old = self.holder.get(rank)
            holder = self._free(node)
            assert holder is not None
            self._put(rank, holder)
            if old is None:
                return
            node = self.node[old]


def _allowed_nodes(nodes: tuple[str, ...], domains: Domains) -> dict[str, tuple[str, ...]]:
    """For each node the other nodes that share the fewest domains with it, those behind it first."""
    unavoidable = everywhere(domains, nodes)
    bit: dict[str, int] = {}
    masks = []
    for node in nodes:
        names = domains.of(node) - unavoidable
        masks.append(sum(1 << bit.setdefault(name, len(bit)) for name in names))
    allowed = {}
    for index, node in enumerate(nodes):
        costs = [(mask & masks[index]).bit_count() for mask in masks]
        turned = [*range(index + 1, len(nodes)), *range(index)]
        least = min((costs[other] for other in turned), default=0)
        allowed[node] = tuple(nodes[other] for other in turned if costs[other] == least)
    return allowed


def mirror_gaps(
    holders: Mapping[int, int], ranks_by_node: Mapping[str, Sequence[int]], *, domains: Domains
) -> dict[int, str]:
    """The ranks whose mirror goes with them in the loss of some domain, and why.

    Domains that hold all nodes are not counted here: see `everywhere`.
    """
    node_of = {rank: node for node, ranks in ranks_by_node.items() for rank in ranks}
    names = {node: domains.of(node) for node in set(node_of.values())}
    unavoidable = everywhere(domains, names)
    gaps = {}
    for rank, node in sorted(node_of.items()):
        holder = holders.get(rank)
        if holder is None or holder not in node_of:
            gaps[rank] = "no other rank is there to hold its mirror"
            continue
        together = (names[node] & names[node_of[holder]]) - unavoidable
        if together:
            shared = ", ".join(sorted(together))
            gaps[rank] = f"its mirror is on rank {holder}, which shares {shared}: no node shares less"
    return gaps


# ---------------------------------------------------------------- standbys


def standby_order(
    nodes: Sequence[str],
    domains: Domains,
    *,
    home: str = "",
    copies: Iterable[str] = (),
    failed: Iterable[str] = (),
) -> tuple[int, ...]:
    """Which of the standbys on `nodes` to take first, as indices into `nodes`.

    First the one that shares the fewest domains with the nodes that have just `failed`; then the one that leaves the
    fewest domains which hold it together with all of the `copies` (nodes that hold its state, too); then one on the
    `home` of the lost rank, then the one named first.
    """
    lost = Counter(name for node in set(failed) for name in domains.of(node))
    together = joint(domains, copies)

    def key(index: int) -> tuple[int, int, bool, int]:
        names = domains.of(nodes[index])
        return sum(lost[name] for name in names), len(names & together), nodes[index] != home, index

    return tuple(sorted(range(len(nodes)), key=key))
