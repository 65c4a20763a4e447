"""Questions about who is in the job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.roster import (
    Member,
    NodeSpec,
    Status,
    by_rank,
    free_local_rank,
    live,
    node_of_rank,
    standbys,
    with_member,
)


def crowd(*members: Member) -> dict[str, Member]:
    return {member.name: member for member in members}


def test_live_members_are_those_with_a_rank_that_can_act():
    members = crowd(
        Member("m2", 1, "n0", Status.RUNNING),
        Member("m0", 0, "n0", Status.JOINING),
        Member("m1", 1, "n0", Status.GONE),
        Member("m3", 0, "n0", Status.FENCED),
        Member("m4", -1, "n0", Status.WARM),
        Member("m5", -1, "n0", Status.FENCED),
    )
    assert [m.name for m in live(members)] == ["m0", "m2"]
    assert {rank: m.name for rank, m in by_rank(members).items()} == {0: "m0", 1: "m2"}
    assert [m.name for m in standbys(members)] == ["m4"]
    assert standbys(members, Status.STARTING) == []


def test_with_member_leaves_the_old_roster_as_it_was():
    old = crowd(Member("m0", 0, "n0", Status.RUNNING))
    new = with_member(old, Member("m0", 0, "n0", Status.GONE))
    assert old["m0"].status is Status.RUNNING and new["m0"].status is Status.GONE


def test_the_free_local_rank_of_a_node():
    members = crowd(
        Member("m0", 0, "n0", Status.RUNNING, local_rank=0),
        Member("m1", 1, "n0", Status.GONE, local_rank=1),
        Member("m2", 2, "n0", Status.RUNNING, local_rank=2),
        Member("m3", 3, "n1", Status.RUNNING, local_rank=0),
    )
    assert free_local_rank(members, "n0") == 1
    assert free_local_rank(members, "n1") == 1
    assert free_local_rank(members, "n2") == 0


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_ranks_are_dealt_to_nodes_in_order(slots):
    nodes = tuple(NodeSpec(f"n{index}", count, 0) for index, count in enumerate(slots))
    places = [node_of_rank(nodes, rank) for rank in range(sum(slots))]
    assert places == [(index, local) for index, count in enumerate(slots) for local in range(count)]
    with pytest.raises(IndexError):
        node_of_rank(nodes, sum(slots))
