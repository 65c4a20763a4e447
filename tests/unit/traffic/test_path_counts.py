"""Counters of connections become speeds of flows, compared only when every spine in use was heard."""

from __future__ import annotations

from keepstep.records.path_messages import Carried, Way
from keepstep.traffic.path_counts import PathCounts

ENDS = ("leaf0", "leaf1")
FAST, SLOW = Way("a", 1, "b", 2), Way("c", 1, "d", 2)
WAYS = {FAST: ((0, 4), ENDS, "spine0"), SLOW: ((1, 5), ENDS, "spine1")}


def counts() -> PathCounts:
    found = PathCounts()
    found.follow(WAYS, now=0.0)
    for way in WAYS:
        found.take(way, Carried(1000, 10))
    return found


def test_speeds_are_bytes_over_busy_time_since_the_last_look() -> None:
    found = counts()
    found.take(FAST, Carried(1000 + 10_000_000, 10 + 100_000))
    found.take(SLOW, Carried(1000 + 1_000_000, 10 + 200_000))
    assert found.heard(1.0) == {ENDS: {(0, 4): ("spine0", 1e8), (1, 5): ("spine1", 5e6)}}
    assert found.heard(1.5) == {}, "they start anew"


def test_a_look_waits_for_every_spine_in_use_but_not_for_ever() -> None:
    found = counts()
    found.take(FAST, Carried(10_001_000, 100_010))
    assert found.heard(1.0) == {}
    assert found.heard(6.0) == {ENDS: {(0, 4): ("spine0", 1e8)}}


def test_a_path_that_delivers_nothing_is_heard_by_the_time_it_takes() -> None:
    found = counts()
    found.take(FAST, Carried(10_001_000, 100_010))
    found.take(SLOW, Carried(1000, 500_010))
    assert found.heard(1.0)[ENDS][1, 5] == ("spine1", 0.0)


def test_another_connection_from_the_same_port_starts_anew() -> None:
    found = counts()
    found.take(FAST, Carried(500, 5))
    found.take(FAST, Carried(10_000_500, 100_005))
    found.take(SLOW, Carried(10_001_000, 100_010))
    assert found.heard(1.0)[ENDS][0, 4] == ("spine0", 1e8)


def test_ways_without_a_connection_and_unknown_ways_say_nothing() -> None:
    found = PathCounts()
    found.follow(WAYS, now=0.0)
    found.take(FAST, Carried())
    found.take(Way("x", 1, "y", 2), Carried(10, 10))
    assert found.heard(100.0) == {}
