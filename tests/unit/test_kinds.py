"""Which kinds of role standbys warm, and the way from the first steps to the rehearsal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobSpec, JobState
from keepstep.control.kinds import choose_kinds
from keepstep.records.messages import Address, AgentHello, Fact, Hello, MemberExited, Order
from keepstep.records.sandbox_messages import (
    MOST_KINDS,
    KeepRecording,
    RecordingKept,
    RecordStep,
    RoleSeen,
    WarmedUp,
    WarmUp,
)

VERSION = "1"


def test_first_middle_and_last_stage_and_the_most_common_last() -> None:
    kinds = {0: "first", 1: "first", 2: "middle", 3: "middle", 4: "middle", 5: "middle", 6: "last", 7: "last"}
    chosen = choose_kinds(kinds, {3: 7, 5: 9})
    assert [kind.name for kind in chosen] == ["first", "last", "middle"]
    assert (chosen[-1].rank, chosen[-1].ranks, chosen[-1].memory_bytes) == (5, (2, 3, 4, 5), 9)


@given(st.dictionaries(st.integers(0, 30), st.sampled_from("abcdefg"), max_size=20))
def test_at_most_three_and_always_the_most_common(kinds: dict[int, str]) -> None:
    chosen = choose_kinds(kinds, {})
    names = [kind.name for kind in chosen]
    assert len(names) == len(set(names)) == min(MOST_KINDS, len(set(kinds.values())))
    assert all(kinds[rank] == kind.name for kind in chosen for rank in (*kind.ranks, kind.rank))
    if kinds:
        counts = [list(kinds.values()).count(name) for name in set(kinds.values())]
        assert len(chosen[-1].ranks) == max(counts)
        if MOST_KINDS > 1 and len(names) > 1:
            assert {kinds[min(kinds)], kinds[max(kinds)]} <= set(names)


class Job:
    """A job of two ranks and a standby, driven by facts."""

    def __init__(self, *, sandbox: bool = True) -> None:
        spec = JobSpec("j", 2, 1, VERSION, b"s", sandbox=sandbox)
        self.state: JobState = new_job(spec, 1)
        self.orders: list[tuple[str, Order]] = []
        self.now = 0.0
        self.tell("", AgentHello("n", 2, 1, VERSION))
        for name in list(self.state.members):
            rank = self.state.members[name].rank
            address = Address(name, "n", name, "h", 1)
            self.tell(name, Hello(name, rank, 2, 1, address, VERSION, "2"))

    def tell(self, member: str, fact: Fact) -> None:
        self.now += 1.0
        decision = decide(self.state, Event("n", member, fact), now=self.now)
        self.state = decision.state
        self.orders += [(one.member, one.order) for one in decision.orders]

    def given(self, kind: type) -> list[str]:
        return [member for member, order in self.orders if isinstance(order, kind)]

    def record(self) -> None:
        self.tell("m0", RoleSeen(0, "a", 10, 10))
        self.tell("m1", RoleSeen(1, "a", 20, 10))


def test_members_record_one_keeps_and_the_standby_rehearses() -> None:
    job = Job()
    assert job.given(RecordStep) == ["m0", "m1"]
    job.record()
    assert [(m, o.keep) for m, o in job.orders if isinstance(o, KeepRecording)] == [("m0", False), ("m1", True)]
    assert not job.given(WarmUp)
    job.tell("m1", RecordingKept(1, "a"))
    assert job.given(WarmUp) == ["m2"] and job.state.members["m2"].warming
    job.tell("m2", WarmedUp(("a",), 1.0))
    assert job.state.members["m2"].warmed == ("a",) and not job.state.members["m2"].warming
    assert job.given(WarmUp) == ["m2"], "once"


def test_a_recording_that_could_not_be_kept_leaves_standbys_as_they_are() -> None:
    job = Job()
    job.record()
    job.tell("m1", RecordingKept(1, "a", why="the disk is full"))
    assert not job.given(WarmUp)


def test_switched_off_nobody_records() -> None:
    job = Job(sandbox=False)
    job.record()
    assert not job.given(RecordStep) and not job.given(KeepRecording)


def test_a_standby_that_ends_in_its_rehearsal_is_replaced_and_was_the_last_to_rehearse() -> None:
    job = Job()
    job.record()
    job.tell("m1", RecordingKept(1, "a"))
    job.tell("m2", MemberExited("m2", -1, 1, 0))
    assert "m3" in job.state.members, "a new standby in its place"
    job.tell("m3", Hello("m3", -1, 2, 1, Address("m3", "n", "m3", "h", 1), VERSION, "2"))
    assert job.given(WarmUp) == ["m2"]
    assert job.state.phase == "running"
