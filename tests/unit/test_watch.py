"""Watch links: few, connected, and enough for news to travel fast (G-12)."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from keepstep.training.plane import Domain, Lane, Op, Plane
from keepstep.training.watch import watch_peers


@given(st.integers(2, 300))
def test_watch_links_are_mutual_and_few(size: int) -> None:
    ranks = tuple(range(10, 10 + size))
    near = {rank: watch_peers(rank, ranks) for rank in ranks}
    assert all(rank in near[other] for rank in ranks for other in near[rank])
    assert max(len(peers) for peers in near.values()) <= 2 * ceil(log2(size))


@given(st.integers(2, 300), st.integers(0, 299), st.integers(0, 299))
def test_news_reach_everybody_in_few_hops_around_a_dead_member(size: int, start: int, dead: int) -> None:
    ranks = tuple(range(size))
    start, dead = start % size, dead % size
    reached, edge, hops = {start}, {start}, 0
    while edge:
        edge = {peer for rank in edge for peer in watch_peers(rank, ranks)} - reached - {dead}
        reached |= edge
        hops += bool(edge)
    assert reached | {dead} == set(ranks)
    assert hops <= ceil(log2(size)) + 1


def test_a_member_of_1024_has_at_most_64_sockets() -> None:
    """Watch links, all_reduce of every size, barrier and broadcast from any root 0, and two listeners."""
    domain = Domain(protected=True)
    most = 0
    for rank in (0, 1, 511, 512, 1023):
        plane = Plane(domain, rank, size=1024, lane=Lane.COLLECTIVE, group="g", global_ranks=tuple(range(1024)))
        data = set().union(
            *(plane.peers_needed(op, nbytes=nbytes) for op in (Op.ALL_REDUCE, Op.BROADCAST) for nbytes in (4, 1 << 26)),
            plane.peers_needed(Op.BARRIER, nbytes=0),
        )
        agreement = plane.peers_needed(Op.ALL_REDUCE, nbytes=4)
        most = max(most, len(data) + len(agreement) + len(watch_peers(rank, range(1024))) + 2)
        plane.close()
    domain.close()
    assert most <= 64
