"""Which kinds of role standbys warm, and the way from the first steps to the rehearsal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobSpec, JobState
from keepstep.control.kinds import choose_kinds
from keepstep.records.messages import Address, AgentHello, Fact, Hello, MemberExited, Order, StartMember
from keepstep.records.sandbox_messages import (
    MOST_KINDS,
    KeepRecording,
    RecordingKept,
    RecordStep,
    RoleSeen,
    WarmedUp,
    WarmUp,
)
from keepstep.training.sandbox import rehearsed_variables

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
    """A job of two ranks on each node and a standby, driven by facts."""

    def __init__(self, *, sandbox: bool = True, nodes: tuple[str, ...] = ("n",)) -> None:
        world = 2 * len(nodes)
        spec = JobSpec("j", world, len(nodes), VERSION, b"s", sandbox=sandbox)
        self.state: JobState = new_job(spec, 1)
        self.orders: list[tuple[str, Order]] = []
        self.now = 0.0
        for node in nodes:
            self.tell("", AgentHello(node, 2, int(node == nodes[0]), VERSION), node=node)
        for name in list(self.state.members):
            member = self.state.members[name]
            address = Address(name, member.node, name, "h", 1)
            self.tell(name, Hello(name, member.rank, world, 1, address, VERSION, "2"), node=member.node)

    def tell(self, member: str, fact: Fact, *, node: str = "n") -> None:
        self.now += 1.0
        decision = decide(self.state, Event(node, member, fact), now=self.now)
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


def test_a_rehearsal_is_on_the_place_of_the_rank_that_recorded() -> None:
    """Groups of a mesh of (nodes, local ranks) have the names that were recorded, and no local rank is too high."""
    job = Job(nodes=("n", "o"))
    started = {order.member: order.environment for _, order in job.orders if isinstance(order, StartMember)}
    ranks = {member.rank: name for name, member in job.state.members.items()}
    assert started[ranks[-1]]["LOCAL_WORLD_SIZE"] == "2" and "LOCAL_RANK" not in started[ranks[-1]]
    for rank in range(4):
        job.tell(ranks[rank], RoleSeen(rank, "a", 10, 10))
    job.tell(ranks[3], RecordingKept(3, "a"))
    ((kind,),) = (order.kinds for _, order in job.orders if isinstance(order, WarmUp))
    assert kind.ranks == (0, 1, 2, 3)
    found, expected = rehearsed_variables(kind, world=4), started[ranks[3]]
    assert found.pop("ROLE_RANK") == "3"
    assert found == {name: expected[name] for name in found} and len(found) == 5


def test_what_computes_on_devices_is_not_rehearsed() -> None:
    job = Job()
    job.tell("m0", RoleSeen(0, "a", 10, 10, on_device=True))
    job.tell("m1", RoleSeen(1, "b", 20, 10))
    assert [(m, o.keep) for m, o in job.orders if isinstance(o, KeepRecording)] == [("m0", False), ("m1", True)]
    job.tell("m1", RecordingKept(1, "b"))
    ((kind,),) = (order.kinds for _, order in job.orders if isinstance(order, WarmUp))
    assert kind.name == "b"
    job = Job()
    job.tell("m0", RoleSeen(0, "a", 10, 10))
    job.tell("m1", RoleSeen(1, "a", 20, 10, on_device=True))
    job.tell("m0", RoleSeen(0, "a", 10, 10))
    assert [(m, o.keep) for m, o in job.orders if isinstance(o, KeepRecording)] == [("m0", False), ("m1", False)]
    assert not job.given(WarmUp)


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
