"""Numbered messages: after any break both sides have all of them, once and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.job_state import Directed, JobSpec
from keepstep.errors import MembershipError, UsageError
from keepstep.records.events import JobStarted
from keepstep.records.messages import KillMember
from keepstep.service.outbox import MOST_KEPT, Outboxes, newer
from keepstep.service.replaying import replay


def directed(name: str, node: str = "a") -> Directed:
    return Directed(node, "", KillMember(1, name, 1.0), "why")


@given(st.lists(st.sampled_from("ab"), max_size=60), st.integers(0, 70))
def test_a_node_gets_what_it_has_not_got_in_order(nodes, got):
    outboxes = Outboxes()
    sent = [outboxes.numbered(directed(f"m{count}", node)) for count, node in enumerate(nodes)]
    for node in "ab":
        own = [one for one in sent if one.node == node]
        assert [one.number for one in own] == list(range(1, len(own) + 1))
        assert outboxes.after(node, got) == own[got:]


def test_what_is_not_kept_any_more_is_said():
    outboxes = Outboxes()
    for count in range(MOST_KEPT + 2):
        outboxes.numbered(directed(f"m{count}"))
    assert len(outboxes.after("a", 2)) == MOST_KEPT
    with pytest.raises(MembershipError, match="not kept"):
        outboxes.after("a", 1)
    assert outboxes.after("unknown", 0) == []


@given(st.integers(0, 20), st.integers(0, 25), st.integers(0, 25))
def test_a_gap_is_never_passed_over(first, count, known):
    kept = [(number, number) for number in range(first + 1, first + 1 + count)]
    if kept and kept[-1][0] > known and known < first:
        with pytest.raises(MembershipError):
            newer(kept, known)
    else:
        assert newer(kept, known) == [number for number, _ in kept if number > known]


def test_a_journal_of_an_older_keepstep_cannot_be_taken_over():
    spec = JobSpec("j", world=1, nnodes=1, keepstep_version="1", secret=b"s")
    with pytest.raises(UsageError, match="who led"):
        replay([JobStarted(job="j", script="x.py")], spec)
