"""Failure domains: mirrors and standbys are placed so that one loss does not take all there is of a rank."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.domains import (
    Domains,
    everywhere,
    joint,
    mirror_gaps,
    mirror_holders,
    standby_order,
)

NAMES = [f"n{number}" for number in range(6)]
LABELS = st.fixed_dictionaries(
    {}, optional={"rack": st.sampled_from("abc"), "power": st.sampled_from("xy"), "release": st.sampled_from("12")}
)
CLUSTERS = st.fixed_dictionaries(dict.fromkeys(NAMES, LABELS)).map(Domains)
SIZES = st.lists(st.integers(0, 3), min_size=6, max_size=6).filter(any)


def spread(sizes: list[int]) -> dict[str, list[int]]:
    """Ranks dealt to nodes in order, `sizes[i]` on node i."""
    first = [sum(sizes[:index]) for index in range(len(sizes))]
    return {name: list(range(start, start + size)) for name, start, size in zip(NAMES, first, sizes, strict=True)}


def racks(count: int, nodes: int, per_node: int) -> tuple[Domains, dict[str, list[int]]]:
    """`count` racks of `nodes` nodes with `per_node` ranks each."""
    names = [f"r{rack}n{node}" for rack in range(count) for node in range(nodes)]
    labels = {name: {"rack": name.split("n")[0]} for name in names}
    return Domains(labels), {n: list(range(i * per_node, (i + 1) * per_node)) for i, n in enumerate(names)}


def least_possible(ranks_by_node: dict[str, list[int]], domains: Domains) -> int:
    """The least number of mirrors that the fullest rank must hold, by Hall's theorem over the sets of nodes."""
    nodes = [node for node, ranks in ranks_by_node.items() if ranks]
    unavoidable = everywhere(domains, nodes)

    def cost(a: str, b: str) -> int:
        return len(domains.shared(a, b) - unavoidable)

    allowed = {}
    for node in nodes:
        others = [other for other in nodes if other != node]
        least = min(cost(node, other) for other in others)
        allowed[node] = {other for other in others if cost(node, other) == least}
    most = 0
    for size in range(1, len(nodes) + 1):
        for some in combinations(nodes, size):
            owed = sum(len(ranks_by_node[node]) for node in some)
            takers = sum(len(ranks_by_node[node]) for node in set.union(*(allowed[node] for node in some)))
            most = max(most, -(-owed // takers))
    return most


class TestTheDomains:
    def test_a_node_is_a_domain_of_its_own(self):
        domains = Domains({"a": {"rack": "r1"}})
        assert domains.of("a") == {"node=a", "rack=r1"}
        assert domains.of("unknown") == {"node=unknown"}

    def test_an_empty_label_is_none(self):
        assert Domains({"a": {"rack": ""}}).of("a") == {"node=a"}

    def test_two_nodes_share_what_both_are_in(self):
        domains = Domains({"a": {"rack": "1", "power": "x"}, "b": {"rack": "2", "power": "x"}})
        assert domains.shared("a", "b") == {"power=x"}

    def test_later_labels_win(self):
        domains = Domains({"a": {"rack": "1", "power": "x"}}).with_labels("a", {"rack": "2"})
        assert domains.of("a") == {"node=a", "rack=2", "power=x"}

    def test_a_domain_knows_its_nodes(self):
        domains, ranks = racks(2, 2, 1)
        assert domains.nodes_in("rack=r1", ranks) == ("r1n0", "r1n1")

    def test_no_nodes_share_nothing(self):
        assert joint(Domains(), []) == frozenset()


class TestMirrors:
    @given(domains=CLUSTERS, sizes=SIZES, rng=st.randoms(use_true_random=False))
    def test_a_holder_shares_as_little_as_any_node_allows(self, domains: Domains, sizes: list[int], rng: random.Random):
        ranks = spread(sizes)
        shuffled = {node: rng.sample(some, len(some)) for node, some in rng.sample(list(ranks.items()), len(ranks))}
        holders = mirror_holders(shuffled, domains)
        assert holders == mirror_holders(ranks, domains)
        node_of = {rank: node for node, some in ranks.items() for rank in some}
        inhabited = set(node_of.values())
        assert set(holders) == (set(node_of) if len(node_of) > 1 else set())
        for rank, holder in holders.items():
            assert rank != holder
            if len(inhabited) > 1:
                mine = node_of[rank]
                least = min(len(domains.shared(mine, other)) for other in inhabited - {mine})
                assert node_of[holder] != mine
                assert len(domains.shared(mine, node_of[holder])) == least

    @given(domains=CLUSTERS, sizes=SIZES)
    def test_no_rank_holds_more_than_some_rank_must(self, domains: Domains, sizes: list[int]):
        ranks = spread(sizes)
        holders = list(mirror_holders(ranks, domains).values())
        if sum(map(bool, sizes)) > 1:
            assert max(holders.count(rank) for rank in holders) == least_possible(ranks, domains)
        elif holders:
            assert max(holders.count(rank) for rank in holders) == 1

    @given(domains=CLUSTERS, sizes=SIZES)
    def test_nothing_moves_where_nothing_changed(self, domains: Domains, sizes: list[int]):
        holders = mirror_holders(spread(sizes), domains)
        assert mirror_holders(spread(sizes), domains, previous=holders) == holders

    @given(domains=CLUSTERS, sizes=SIZES, wild=st.dictionaries(st.integers(-2, 20), st.integers(-2, 20)))
    def test_any_past_gives_a_placement_as_good(self, domains: Domains, sizes: list[int], wild: dict[int, int]):
        ranks = spread(sizes)
        fresh, kept = mirror_holders(ranks, domains), mirror_holders(ranks, domains, previous=wild)
        assert set(fresh) == set(kept)
        loads = [max((list(one.values()).count(rank) for rank in one.values()), default=0) for one in (fresh, kept)]
        assert loads[0] == loads[1]

    def test_racks_are_crossed_and_everybody_holds_one(self):
        domains, ranks = racks(4, 4, 8)
        holders = mirror_holders(ranks, domains)
        assert sorted(holders.values()) == list(range(128))
        assert mirror_gaps(holders, ranks, domains=domains) == {}

    def test_a_node_that_is_replaced_moves_few_mirrors(self):
        domains, ranks = racks(4, 4, 8)
        before = mirror_holders(ranks, domains)
        ranks["r2n9"] = ranks.pop("r0n1")
        domains = domains.with_labels("r2n9", {"rack": "r2"})
        after = mirror_holders(ranks, domains, previous=before)
        moved = [rank for rank in before if before[rank] != after[rank]]
        assert len(moved) <= 4 * 8
        assert mirror_gaps(after, ranks, domains=domains) == {}

    def test_a_large_rack_fills_a_small_one(self):
        domains = Domains({"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2"}})
        holders = mirror_holders({"a": [0, 1], "b": [2, 3], "c": [4]}, domains)
        assert {rank: holders[rank] for rank in range(4)} == dict.fromkeys(range(4), 4)

    def test_one_node_is_a_ring_of_its_ranks(self):
        assert mirror_holders({"a": [3, 5, 9]}, Domains()) == {3: 5, 5: 9, 9: 3}

    def test_a_rank_alone_has_no_holder_and_that_is_said(self):
        assert mirror_holders({"a": [0]}, Domains()) == {}
        assert mirror_gaps({}, {"a": [0]}, domains=Domains()) == {0: "no other rank is there to hold its mirror"}

    def test_what_cannot_be_covered_is_named_with_the_reason(self):
        domains = Domains({"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2", "power": "x"}})
        domains = domains.with_labels("a", {"power": "x"})
        ranks = {"a": [0], "b": [1], "c": [2]}
        gaps = mirror_gaps(mirror_holders(ranks, domains), ranks, domains=domains)
        assert set(gaps) == {0}
        assert "power=x" in gaps[0] or "rack=1" in gaps[0]

    def test_a_domain_of_all_nodes_is_said_once_and_not_for_each_rank(self):
        domains = Domains({"a": {"release": "1"}, "b": {"release": "1"}})
        ranks = {"a": [0], "b": [1]}
        assert mirror_gaps(mirror_holders(ranks, domains), ranks, domains=domains) == {}
        assert everywhere(domains, ranks) == {"release=1"}

    def test_a_thousand_nodes_are_placed_in_one_go(self):
        domains, ranks = racks(32, 32, 8)
        holders = mirror_holders(ranks, domains)
        assert sorted(holders.values()) == list(range(8192))
        assert mirror_gaps(holders, ranks, domains=domains) == {}


class TestStandbys:
    RACKS = Domains({"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2"}})

    def test_without_labels_the_lost_ranks_node_comes_first(self):
        assert standby_order(["b", "a"], Domains(), home="a") == (1, 0)

    def test_a_standby_beside_what_failed_comes_last(self):
        assert standby_order(["b", "c"], self.RACKS, home="a", failed=["a"]) == (1, 0)

    def test_a_standby_that_would_join_all_copies_in_one_rack_comes_last(self):
        assert standby_order(["a", "c"], self.RACKS, home="a", copies=["b"]) == (1, 0)

    def test_a_copy_elsewhere_leaves_the_choice_to_the_home(self):
        assert standby_order(["c", "a"], self.RACKS, home="a", copies=["b", "c"]) == (1, 0)

    @given(domains=CLUSTERS, nodes=st.lists(st.sampled_from(NAMES)), failed=st.lists(st.sampled_from(NAMES)))
    def test_every_standby_has_one_place_in_the_order(self, domains: Domains, nodes: list[str], failed: list[str]):
        order = standby_order(nodes, domains, failed=failed)
        assert sorted(order) == list(range(len(nodes)))

    @pytest.mark.parametrize("count", [0, 1])
    def test_no_choice_is_no_trouble(self, count: int):
        assert standby_order(["a"] * count, Domains()) == tuple(range(count))
