"""The job machine in a move, whatever is said in which order: one holder for each rank, generations only grow (G-10),
a move has one end, and nobody is told to commit who was not asked to prepare (G-22)."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobSpec, JobState, Tick
from keepstep.control.roster import Status, live
from keepstep.records.address import Address
from keepstep.records.messages import (
    Abort,
    AgentHello,
    Fetched,
    Finished,
    FirstStep,
    Hello,
    MemberExited,
    MemberStopped,
    Parked,
    PeerLostReport,
    Ready,
    Settled,
)
from keepstep.records.move_messages import (
    AskAddress,
    CommitMove,
    MoveCommitted,
    MovePrepared,
    MoveRefused,
    MoveTaken,
    PrepareMove,
)
from keepstep.records.moves import MoveRequest

NAMES = ("m0", "m1", "m2", "m3", "m4", "m5")
SPEC = JobSpec("j", 3, 1, "1", b"s", patience_s=20.0)
generations = st.integers(0, 3)
versions = st.integers(6, 9)
facts = st.one_of(
    st.builds(MovePrepared, number=st.integers(1, 2), peers=st.sampled_from([(), (0,), (0, 2)])),
    st.builds(MovePrepared, number=st.just(1), why=st.just("no memory")),
    st.builds(MoveCommitted, number=st.integers(1, 2), generation=generations, version=versions),
    st.builds(MoveRefused, number=st.just(1), version=versions, why=st.just("busy"), failed=st.integers(1, 3)),
    st.builds(MoveTaken, number=st.just(1), version=versions),
    st.builds(AskAddress, rank=st.integers(-1, 3)),
    st.builds(Ready, generation=generations, replica=st.just("all")),
    st.builds(FirstStep, generation=generations, version=versions),
    st.builds(Finished, version=versions),
    st.builds(Parked, generation=generations, version=st.integers(-1, 9), agreed=st.booleans(), boundary=st.booleans()),
    st.builds(Settled, generation=generations, version=versions, digest=st.just("d"), replica=st.just("all")),
    st.builds(Fetched, generation=generations, version=versions, digest=st.just("d"), bytes_moved=st.just(1)),
    st.builds(PeerLostReport, generation=generations, rank=st.integers(0, 2)),
)
happenings = st.one_of(
    st.tuples(st.sampled_from(NAMES), facts),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["killed", "done", "frozen", "hello"])),
    st.tuples(st.just(""), st.sampled_from([0.1, 1.5, 30.0])),
    st.tuples(st.just(""), st.builds(MoveRequest, ranks=st.sampled_from([(1,), (0, 2), (2,)]))),
)


def hello(name: str, rank: int) -> Hello:
    return Hello(name, rank, 3, 1, Address(name, "n0", name, "n0", 1), "1", "2")


@functools.cache
def running() -> JobState:
    """Three ranks and two standbys in mid-job, with a move of ranks 0 and 2 asked for."""
    state = new_job(SPEC, 1)
    said = [("", AgentHello("n0", 3, 2, "1"))]
    said += [(name, hello(name, rank)) for name, rank in (("m0", 0), ("m1", 1), ("m2", 2), ("m3", -1), ("m4", -1))]
    said += [(name, FirstStep(0, 6)) for name in ("m0", "m1", "m2")]
    for name, fact in said:
        state = decide(state, Event("n0", name, fact), now=1.0).state
    return decide(state, Event("", "", MoveRequest((0, 2))), now=2.0).state


def event_of(name: str, what: object) -> Event:
    """What reaches the controller."""
    if isinstance(what, float):
        return Event("", "", Tick())
    if what == "killed":
        return Event("n0", name, MemberExited(name, -1, -9, 9, {7: b"p", 8: b"q"}))
    if what == "done":
        return Event("n0", name, MemberExited(name, -1, 0, 0))
    if what == "frozen":
        return Event("n0", name, MemberStopped(name, -1, 1.0))
    if what == "hello":
        return Event("n0", name, hello(name, -1))
    return Event("n0" if name else "", name, what)


@settings(max_examples=150, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_whatever_is_said_every_rank_has_one_holder_and_generations_grow(happened):
    state, now, aborted, asked, ended = running(), 3.0, 0, set(), []
    for name, what in happened:
        now += what if isinstance(what, float) else 0.01
        decision = decide(state, event_of(name, what), now=now)
        before, state = state, decision.state
        ranks = [member.rank for member in live(state.members)]
        assert len(ranks) == len(set(ranks))
        assert state.generation >= before.generation or state.attempt > before.attempt
        for directed in decision.orders:
            if isinstance(directed.order, Abort):
                assert directed.order.generation >= aborted
                aborted = directed.order.generation
            if isinstance(directed.order, PrepareMove):
                asked.add((directed.order.number, directed.member))
            if isinstance(directed.order, CommitMove):
                assert (directed.order.number, directed.member) in asked
        ended += [record.number for record in decision.moves]
        assert len(ended) == len(set(ended)) == state.moves - (state.move is not None)
        joiners = [m for m in state.members.values() if m.moving and m.status not in (Status.GONE, Status.FENCED)]
        assert state.move is not None or not joiners
