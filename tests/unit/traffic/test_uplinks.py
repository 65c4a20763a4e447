"""The engine of the plan: the bound is always met, and changes move few flows."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.traffic.uplinks import Uplinks

fabrics = st.tuples(st.integers(2, 7), st.integers(1, 6))


@st.composite
def multigraphs(draw):
    leaves, spines = draw(fabrics)
    leaf = st.integers(0, leaves - 1)
    pairs = draw(st.lists(st.tuples(leaf, leaf).filter(lambda pair: pair[0] != pair[1]), max_size=60))
    return leaves, spines, pairs


def ceil_of_max_degree(pairs, spines):
    degrees = Counter(("up", a) for a, _ in pairs) + Counter(("down", b) for _, b in pairs)
    return math.ceil(max(degrees.values(), default=0) / spines)


def planned(leaves, spines, pairs):
    uplinks = Uplinks(leaves, spines)
    for number, (a, b) in enumerate(pairs):
        uplinks.add(number, source=a, destination=b)
    return uplinks


def check_books(uplinks, pairs):
    """Loads are those of the flows' spines."""
    counted = Counter()
    for flow, spine in uplinks.spine_of.items():
        a, b = pairs[flow]
        counted[a, spine] += 1
        counted[uplinks.leaves + b, spine] += 1
    assert {(end, spine): flows for end, spine, flows in uplinks.loads()} == dict(counted)


@given(multigraphs())
@settings(max_examples=120, deadline=None)
def test_the_maximum_is_the_ceiling_of_degree_over_spines(graph):
    """König: max load = ceil(max degree / spines), and every leaf keeps to its own ceiling."""
    leaves, spines, pairs = graph
    uplinks = planned(leaves, spines, pairs)
    check_books(uplinks, pairs)
    assert uplinks.max_load == uplinks.bound == ceil_of_max_degree(pairs, spines)
    for end, _, flows in uplinks.loads():
        degree = sum((a if end < leaves else leaves + b) == end for a, b in pairs)
        assert flows <= math.ceil(degree / spines)


@given(multigraphs(), st.data())
@settings(max_examples=120, deadline=None)
def test_one_arrival_moves_fewer_flows_than_there_are_leaf_ends(graph, data):
    leaves, spines, pairs = graph
    uplinks = planned(leaves, spines, pairs)
    uplinks.settle()
    a = data.draw(st.integers(0, leaves - 1))
    b = data.draw(st.integers(0, leaves - 1).filter(lambda leaf: leaf != a))
    uplinks.add(len(pairs), source=a, destination=b)
    assert len(uplinks.settle()) < 2 * leaves
    assert uplinks.max_load == ceil_of_max_degree([*pairs, (a, b)], spines)


@given(multigraphs(), st.data())
@settings(max_examples=120, deadline=None)
def test_departures_keep_the_bound(graph, data):
    leaves, spines, pairs = graph
    uplinks = planned(leaves, spines, pairs)
    gone = data.draw(st.sets(st.integers(0, len(pairs) - 1))) if pairs else set()
    uplinks.remove(sorted(gone))
    left = {number: pair for number, pair in enumerate(pairs) if number not in gone}
    check_books(uplinks, left)
    assert uplinks.max_load == ceil_of_max_degree(left.values(), spines)


@given(multigraphs(), st.data())
@settings(max_examples=120, deadline=None)
def test_a_lost_link_is_avoided_and_comes_back(graph, data):
    leaves, spines, pairs = graph
    uplinks = planned(leaves, spines, pairs)
    before = dict(uplinks.spine_of)
    uplinks.settle()
    end = data.draw(st.integers(0, 2 * leaves - 1))
    spine = data.draw(st.integers(0, spines - 1))
    homeless = uplinks.forbid([(end, spine)])
    assert (end, spine) not in {(e, s) for e, s, _ in uplinks.loads()}
    assert not homeless or spines == 1
    assert uplinks.max_load >= uplinks.bound
    moved = {flow for flow, old in before.items() if uplinks.spine_of.get(flow) != old} - set(homeless)
    assert set(uplinks.settle()) == moved
    uplinks.permit([(end, spine)])
    if not homeless:
        check_books(uplinks, pairs)
        assert uplinks.max_load == ceil_of_max_degree(pairs, spines)


def test_a_failure_moves_only_what_it_must_where_there_is_room():
    """8 flows of one leaf to another over 4 spines, 2 each: a lost spine moves its own 2 and no other."""
    uplinks = planned(2, 4, [(0, 1)] * 8)
    lost = {flow for flow, spine in uplinks.spine_of.items() if spine == 2}
    uplinks.settle()
    assert uplinks.forbid([(0, 2), (3, 2)]) == []
    assert set(uplinks.settle()) == lost
    assert uplinks.max_load == uplinks.bound == 3


def test_no_spine_is_left_between_two_leaves():
    uplinks = planned(2, 1, [(0, 1)])
    assert uplinks.forbid([(0, 0)]) == [0]
    assert not uplinks.reachable(0, 1)
    assert uplinks.max_load == 0


def history_of(uplinks: Uplinks, deeds: list[tuple[str, int, int]]) -> None:
    """Flows come (from, to) and go (which, -), links (end, spine) fail and come back. What has no way is left out."""
    ends: dict[int, tuple[int, int]] = {}
    for number, (kind, one, other) in enumerate(deeds):
        if kind == "add" and one != other and uplinks.reachable(one, other):
            uplinks.add(number, source=one, destination=other)
            ends[number] = (one, other)
        elif kind == "remove" and ends:
            flow = sorted(ends)[one % len(ends)]
            uplinks.remove([flow])
            del ends[flow]
        elif kind == "forbid":
            for flow in uplinks.forbid([(one, other)]):
                del ends[flow]
        elif kind == "permit":
            uplinks.permit([(one, other)])


def test_flows_that_go_after_a_failure_leave_no_link_fuller_than_the_bound():
    """A leaf whose links had to carry two must not be given a second flow on one of them when one is enough."""
    uplinks = Uplinks(3, 2)
    arrivals = [("add", 0, 2), ("add", 0, 1), ("add", 1, 0), ("forbid", 1, 0), ("add", 0, 2), ("add", 1, 2)]
    history_of(uplinks, [*arrivals, ("permit", 1, 0), ("forbid", 5, 1), ("remove", 0, 0), ("permit", 5, 1)])
    assert uplinks.max_load == uplinks.bound == 1


@st.composite
def histories(draw):
    leaves, spines = draw(st.tuples(st.integers(2, 4), st.integers(2, 3)))
    leaf = st.integers(0, leaves - 1)
    link = st.tuples(st.integers(0, 2 * leaves - 1), st.integers(0, spines - 1))
    deed = st.one_of(
        st.tuples(st.just("add"), leaf, leaf),
        st.tuples(st.just("remove"), st.integers(0, 99), st.just(0)),
        st.tuples(st.sampled_from(["forbid", "permit"]), link).map(lambda deed: (deed[0], *deed[1])),
    )
    return leaves, spines, draw(st.lists(deed, max_size=30))


@given(histories())
@settings(max_examples=200, deadline=None)
def test_when_all_links_are_back_the_plan_is_the_optimum_again(case):
    leaves, spines, deeds = case
    uplinks = Uplinks(leaves, spines)
    history_of(uplinks, deeds)
    for end in range(2 * leaves):
        uplinks.permit([(end, spine) for spine in range(spines)])
    assert uplinks.max_load == uplinks.bound
