"""Of the links that a collective waits for a dead one is told, not one that is slow or not used yet."""

from __future__ import annotations

from keepstep.records.summary import GroupMark, HostSample, MemberProgress, StalledPeer
from keepstep.traffic.calls import CallsUnderWay

GROUP = 7
EVERY_S = 0.5


def word(rank: int, peer: int, *, age_s: float, sent: int = 0, received: int = 0, started: int = 5) -> MemberProgress:
    """`rank` is in a call and has waited for `peer` all the time."""
    age_us = int(age_s * 1e6)
    waits = (StalledPeer(peer, sent, received, 0, age_us if sent else 0, 0, 0 if sent else age_us),)
    mark = GroupMark(GROUP, 0, 2, rank, started, started, started - 1, op=1, open_us=age_us, peers=waits)
    return MemberProgress(rank, 1, 3, 0, 0, 0, 0, 0, HostSample(), groups=(mark,))


def told(calls: CallsUnderWay, words: list[list[MemberProgress]]) -> list[list[tuple[int, int]]]:
    """The links that carry nothing, after the words of each half second."""
    return [
        [link for one in now for link in calls.stalled(one, now=100.0 + EVERY_S * turn)]
        for turn, now in enumerate(words)
    ]


def test_a_link_that_carries_nothing_is_told_as_soon_as_that_is_known() -> None:
    ages = [0.5, 1.0, 1.5, 2.0, 2.5]
    words = [[word(0, 1, age_s=age, sent=9000), word(1, 0, age_s=age, received=7000)] for age in ages]
    assert told(CallsUnderWay(), words) == [[], [], [], [(0, 1), (1, 0)], [(0, 1), (1, 0)]]


def test_a_slow_link_is_no_dead_one() -> None:
    """What the sender gives leaves its buffers unseen; at the receiver bytes come in, if not in every half second."""
    got = [1000, 1000, 2000, 2000, 3000, 4000, 4000, 5000]
    words = [
        [word(0, 1, age_s=0.5 * turn, sent=9000), word(1, 0, age_s=0.5 * turn, received=some)]
        for turn, some in enumerate(got, 1)
    ]
    assert told(CallsUnderWay(), words) == [[]] * 8


def test_a_link_that_slowed_down_and_then_died_is_told() -> None:
    words = [[word(1, 0, age_s=0.5 * turn, received=min(1000 * turn, 4000))] for turn in range(1, 10)]
    assert told(CallsUnderWay(), words)[-1] == [(1, 0)]


def test_who_has_not_come_to_a_call_is_not_waited_for_over_a_dead_link() -> None:
    """It computes, or is in a call of another group that takes long."""
    words = [[word(0, 1, age_s=0.5 * turn), word(1, 0, age_s=0.0, started=4)] for turn in range(1, 8)]
    assert told(CallsUnderWay(), words) == [[]] * 7


def test_all_wait_for_one_who_has_not_come_though_not_over_their_own_links() -> None:
    """As in the vote behind a collective that takes long: rank 0 has come, and waits itself."""
    words = [
        [word(4, 0, age_s=0.5 * turn), word(0, 1, age_s=0.5 * turn), word(1, 5, age_s=0.0, started=4)]
        for turn in range(1, 8)
    ]
    assert told(CallsUnderWay(), words)[1:] == [[]] * 6


def test_a_new_generation_begins_afresh() -> None:
    calls = CallsUnderWay()
    told(calls, [[word(0, 1, age_s=0.5 * turn)] for turn in range(1, 5)])
    mark = word(0, 1, age_s=2.0).groups
    assert calls.stalled(MemberProgress(0, 2, 3, 0, 0, 0, 0, 0, HostSample(), groups=mark), now=102.0) == []
