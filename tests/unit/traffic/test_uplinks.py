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
