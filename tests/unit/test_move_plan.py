"""What a wish to move ranks comes to, and each mistake in one clear line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.job import decide
from keepstep.control.job_state import Change, Event, JobSpec, JobState, WarmState
from keepstep.control.move_plan import plan_move
from keepstep.control.move_state import Heir, Move
from keepstep.control.roster import Member, NodeSpec, Status
from keepstep.errors import UsageError
from keepstep.records.domain_messages import NodeLost
from keepstep.records.messages import StartMember
from keepstep.records.moves import MoveRequest

SPEC = JobSpec("j", 4, 2, "1", b"s")
NODES = (NodeSpec("n0", 2, 1), NodeSpec("n1", 2, 0))


def member(name: str, rank: int, node: str, status: Status = Status.RUNNING) -> Member:
    return Member(name, rank, node, status)


def job(**changes: object) -> JobState:
    """Two nodes with two ranks each, a standby on the first; in the middle of training."""
    ranks = [member("m0", 0, "n0"), member("m1", 1, "n0"), member("m2", 2, "n1"), member("m3", 3, "n1")]
    members = {m.name: m for m in (*ranks, member("m4", -1, "n0", Status.WARM))}
    state = JobState(SPEC, 1, phase="running", nodes=NODES, members=members, generation=1, version=7)
    return msgspec.structs.replace(state, **changes)


def test_a_rank_goes_to_another_node_if_it_has_room():
    assert plan_move(job(), MoveRequest((2,))) == (Heir(2, "m2", "n1", "n0"),)


def test_a_rank_stays_on_its_node_if_only_that_has_room():
    assert plan_move(job(), MoveRequest((1,))) == (Heir(1, "m1", "n0", "n0"),)


def test_a_whole_node_needs_room_for_all():
    with pytest.raises(UsageError, match="node n0 has standbys or room for 1 of these ranks only"):
        plan_move(job(), MoveRequest((), node="n1"))
    roomy = job(nodes=(NodeSpec("n0", 2, 3), NODES[1]))
    assert [heir.node for heir in plan_move(roomy, MoveRequest((), node="n1"))] == ["n0", "n0"]


def test_a_whole_node_never_moves_to_itself():
    """It is to be empty afterwards, whatever standbys it has."""
    members = {"m0": member("m0", 0, "n0"), "m1": member("m1", 1, "n1"), "m2": member("m2", -1, "n0", Status.WARM)}
    nodes = (NodeSpec("n0", 1, 1), NodeSpec("n1", 1, 0))
    with pytest.raises(UsageError, match="node n1 has neither a standby nor room"):
        plan_move(job(members=members, nodes=nodes), MoveRequest((), node="n0"))
    with pytest.raises(UsageError, match="there is no node but n0"):
        plan_move(job(nodes=NODES[:1]), MoveRequest((), node="n0"))
    assert plan_move(job(members=members, nodes=nodes), MoveRequest((0,)))[0].node == "n0", "one rank may"


MEMBERS = job().members
MOVE = Move(3, 2, (Heir(1, "m1", "n0", "n1"),), 0.0, 0.0)
FINISHED = MEMBERS | {"m3": member("m3", 3, "n1", Status.FINISHED)}
STARTING = MEMBERS | {"m0": member("m0", 0, "n0", Status.STARTING)}


@pytest.mark.parametrize(
    ("changes", "request_", "what"),
    [
        ({}, MoveRequest((4,)), "no rank 4 in a job of 4 -> ranks are 0 to 3"),
        ({}, MoveRequest((-1,)), "no rank -1"),
        ({}, MoveRequest((1, 2, 1)), "rank 1 is given twice -> give each rank once"),
        ({}, MoveRequest((1,), to="n7"), "no node 'n7' in this job -> nodes: n0, n1"),
        ({}, MoveRequest((), node="n7"), "no node 'n7'"),
        ({}, MoveRequest((1,), to="n0"), "rank 1 is on node n0 already"),
        ({}, MoveRequest((1,), to="n1"), "node n1 has neither a standby nor room"),
        ({}, MoveRequest(()), "neither ranks nor a node"),
        ({}, MoveRequest((1,), node="n0"), "or both"),
        ({"nodes": (*NODES, NodeSpec("n2", 1, 0))}, MoveRequest((), node="n2"), "no rank is on node n2"),
        ({"nodes": (NODES[0], NodeSpec("n1", 2, 0, gone=True))}, MoveRequest((1,), to="n1"), "no node 'n1'"),
        ({"move": MOVE}, MoveRequest((2,)), r"move 3 \(rank 1\) is under way -> try again"),
        ({"change": Change(2, 0.0, ()), "phase": "changing"}, MoveRequest((2,)), "a membership change is under way"),
        ({"exit_code": 0, "phase": "ending"}, MoveRequest((2,)), "the job is ending"),
        ({"members": STARTING, "phase": "starting"}, MoveRequest((2,)), r"ranks \[0\] have not called keepstep.join"),
        ({"phase": "gathering"}, MoveRequest((2,)), "no step is complete yet"),
        ({"version": 0}, MoveRequest((2,)), "no step is complete yet"),
        ({"members": FINISHED}, MoveRequest((2,)), "the job has made its last step"),
    ],
)
def test_a_mistake_is_one_line(changes, request_, what):
    with pytest.raises(UsageError, match=what) as caught:
        plan_move(job(**changes), request_)
    assert "\n" not in str(caught.value)


@given(
    st.builds(
        MoveRequest,
        ranks=st.lists(st.integers(-2, 5), max_size=4).map(tuple),
        node=st.sampled_from(["", "n0", "n1", "n9"]),
        to=st.sampled_from(["", "n0", "n1", "n9"]),
    )
)
def test_whatever_is_wished_is_planned_for_ranks_that_exist_or_one_line(request_):
    try:
        heirs = plan_move(job(), request_)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert len({heir.rank for heir in heirs}) == len(heirs) > 0
    assert all(job().members[heir.leaver].rank == heir.rank and heir.node in ("n0", "n1") for heir in heirs)


def test_a_wish_that_came_too_late_changes_nothing():
    """The shell asks before; if the job has changed meanwhile, the machine says why not."""
    decision = decide(job(version=0), Event("", "", MoveRequest((2,))), now=1.0)
    assert decision.state.move is None and not decision.orders and "no move: no step" in decision.reason


def test_a_node_that_goes_away_before_a_process_is_warm_there_ends_the_move_with_that_word():
    """No process is started on it any more."""
    state = job(nodes=(*NODES, NodeSpec("n2", 0, 2)), named=5)
    asked = decide(state, Event("", "", MoveRequest((1,), to="n2")), now=1.0)
    assert [(one.node, type(one.order)) for one in asked.orders] == [("n2", StartMember)]
    decision = decide(asked.state, Event("n2", "", NodeLost("n2", "its agent is gone")), now=2.0)
    (record,) = decision.moves
    assert (record.outcome, record.why) == ("not made", "node n2 is lost")
    assert decision.state.move is None and decision.state.phase == "running"
    assert not any(one.node == "n2" for one in decision.orders)


def test_the_standby_that_has_rehearsed_such_a_role_takes_the_rank():
    """As for a rank that is lost; one that is just rehearsing comes last."""
    idle, busy = member("m4", -1, "n0", Status.WARM), msgspec.structs.replace(MEMBERS["m4"], name="m5", warming=True)
    other = msgspec.structs.replace(idle, name="m6", warmed=("b",))
    same = msgspec.structs.replace(idle, name="m7", warmed=("b", "a"))
    for there, chosen in (((busy, idle), "m4"), ((busy, other, same), "m7"), ((busy,), "m5")):
        ranks = [m for m in MEMBERS.values() if m.rank >= 0]
        members = {m.name: m for m in (*ranks, *there)}
        state = job(members=members, warm=WarmState(kinds={2: "a"}), nodes=(NodeSpec("n0", 2, 3), NODES[1]))
        asked = decide(state, Event("", "", MoveRequest((2,), to="n0")), now=1.0)
        assert [heir.joiner for heir in asked.state.move.heirs] == [chosen]


def test_a_rank_goes_where_a_standby_has_rehearsed_such_a_role():
    cold = member("m5", -1, "n2", Status.WARM)
    nodes = (*NODES, NodeSpec("n2", 0, 2))
    for warmed, node in ((None, "n2"), (("b",), "n2"), (("a",), "n0")):
        warm = msgspec.structs.replace(MEMBERS["m4"], warmed=warmed)
        state = job(members=MEMBERS | {"m4": warm, "m5": cold}, nodes=nodes, warm=WarmState(kinds={2: "a"}))
        assert [heir.node for heir in plan_move(state, MoveRequest((2,)))] == [node]
