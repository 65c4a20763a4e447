"""Replicas that were equal and are not any more: who is named, when it ends, what is none of ours."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.diagnosis.replicas import ReplicaCheck
from keepstep.records.messages import StateDigest


def told(check: ReplicaCheck, version: int, digests: dict[int, str], replica: str = "r"):
    """What comes out when every rank says its digest in order."""
    news = [check.note(StateDigest(rank, version, digest, replica)) for rank, digest in digests.items()]
    return [one for one in news if one is not None]


def ranks(news) -> list[list[int]]:
    return [[suspect.rank for suspect in suspects] for suspects in news.finding.suspects]


def test_a_replica_that_leaves_the_majority_is_named():
    check = ReplicaCheck()
    assert told(check, 16, {0: "a", 1: "a", 2: "a"}) == []
    news = told(check, 32, {0: "b", 1: "b", 2: "x"})
    assert [(one.status, ranks(one)) for one in news] == [("new", [[2]])]
    assert news[0].finding.kind == "state_divergence" and news[0].finding.victims == (0, 1)


def test_the_order_of_answers_does_not_matter_in_the_end():
    check = ReplicaCheck()
    told(check, 16, {0: "a", 1: "a", 2: "a"})
    news = told(check, 32, {2: "x", 0: "b", 1: "b"})
    assert [(one.status, ranks(one)) for one in news] == [("new", [[0, 2]]), ("updated", [[2]])]


def test_of_two_replicas_it_is_one_of_both():
    check = ReplicaCheck()
    told(check, 16, {3: "a", 7: "a"})
    (news,) = told(check, 32, {3: "b", 7: "c"})
    assert ranks(news) == [[3, 7]] and news.finding.next_probe
    assert told(check, 48, {3: "d", 7: "e"}) == []


def test_it_ends_when_they_are_equal_again():
    check = ReplicaCheck()
    told(check, 16, {3: "a", 7: "a"})
    told(check, 32, {3: "b", 7: "c"})
    (news,) = told(check, 48, {3: "d", 7: "d"})
    assert news.status == "ended"
    assert told(check, 64, {3: "d", 7: "x"})[0].status == "new"


def test_replicas_that_were_never_equal_are_not_reported():
    check = ReplicaCheck()
    assert told(check, 16, {0: "a", 1: "b"}) + told(check, 32, {0: "c", 1: "d"}) == []
    assert told(check, 16, {0: "a"}, "one") + told(check, 16, {1: "b"}, "two") == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from("ab"), st.sampled_from("pq"))))
def test_a_named_rank_always_said_something_else_than_another(facts):
    check = ReplicaCheck()
    said: dict[tuple[str, int], dict[int, str]] = {}
    for rank, version, digest, replica in facts:
        said.setdefault((replica, version), {})[rank] = digest
        news = check.note(StateDigest(rank, version, digest, replica))
        if news is not None and news.status != "ended":
            assert len(set(said[replica, version].values())) > 1
            assert {r for one in ranks(news) for r in one} <= set(said[replica, version])
