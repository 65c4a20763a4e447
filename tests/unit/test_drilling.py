"""What a drill means for a job: who gets which order, and one clear line for what makes no sense."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.control.drilling import drill_words, parse_start_drill, plan_drill
from keepstep.control.job import new_job
from keepstep.control.job_state import JobSpec, JobState
from keepstep.control.roster import Member, NodeSpec, Status
from keepstep.errors import UsageError
from keepstep.records.drills import DRILLS, DrillRequest
from keepstep.records.messages import Drill

SPEC = JobSpec(job="j", world=4, nnodes=2, keepstep_version="1", secret=b"s" * 32)


def running(*, nodes: int = 2) -> JobState:
    """Four ranks m0 to m3, dealt to the nodes in order."""
    specs = tuple(NodeSpec(f"n{i}", 4 // nodes, 0) for i in range(nodes))
    members = {f"m{r}": Member(f"m{r}", r, f"n{r * nodes // 4}", Status.RUNNING) for r in range(4)}
    return msgspec.structs.replace(new_job(SPEC, 3), phase="running", nodes=specs, members=members)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (DrillRequest("melt", 1), "no such drill: melt"),
        (DrillRequest("kill"), "needs --rank"),
        (DrillRequest("kill", 4), "no rank 4"),
        (DrillRequest("kill", -7), "no rank -7"),
        (DrillRequest("kill", 1, -2), "no step -2"),
        (DrillRequest("kill", 1, steps=3), "over at once"),
        (DrillRequest("kill", 1, stop=True), "over at once"),
        (DrillRequest("kill", 1, factor=2.0), "--factor means nothing"),
        (DrillRequest("kill", 1, source=2), "--from means nothing"),
        (DrillRequest("slow-compute", 1, factor=1.0), "factor 1"),
        (DrillRequest("slow-compute", 1, factor=0.5), "factor 0.5"),
        (DrillRequest("slow-compute", 1, factor=float("nan")), "factor nan"),
        (DrillRequest("slow-compute", 1, factor=float("inf")), "factor inf"),
        (DrillRequest("slow-compute", 1, steps=-1), "for -1 steps"),
        (DrillRequest("slow-compute", 1, factor=1.3, stop=True), "--factor means nothing"),
        (DrillRequest("slow-compute", 1, 9, stop=True), "--stop ends"),
        (DrillRequest("freeze", 1, steps=4), "no steps to count"),
        (DrillRequest("throttle-link", source=0, destination=1), "--rate or --factor"),
        (DrillRequest("throttle-link", source=0, destination=1, rate=1.0, factor=2.0), "--rate or --factor"),
        (DrillRequest("throttle-link", source=0, destination=1, rate=-5.0), "rate -5"),
        (DrillRequest("throttle-link", source=0, destination=1, rate=float("inf")), "rate inf"),
        (DrillRequest("cut-link", source=2, destination=2), "two different ranks"),
        (DrillRequest("cut-link", source=2), "needs --to"),
        (DrillRequest("cut-link", source=2, destination=9), "no rank 9"),
        (DrillRequest("throttle-node", node="n9", factor=2.0), "no node 'n9'"),
        (DrillRequest("throttle-node", factor=2.0), "needs --node"),
        (DrillRequest("mismatch", 1, how="mood"), "no mismatch 'mood'"),
        (DrillRequest("never-start", 1), "keepstep run --drill never-start:RANK"),
    ],
)
def test_nonsense_is_one_clear_line(request_, says):
    with pytest.raises(UsageError) as caught:
        plan_drill(running(), request_)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_signals_go_to_the_agent_and_the_rest_to_the_member():
    (kill,) = plan_drill(running(), DrillRequest("kill", 3, 30))
    assert (kill.node, kill.member, kill.order) == ("n1", "", Drill(3, "kill", 3, 30))
    (slow,) = plan_drill(running(), DrillRequest("slow-compute", 3, 30, steps=5))
    assert (slow.node, slow.member) == ("n1", "m3")
    assert slow.order == Drill(3, "slow-compute", 3, 30, steps=5, factor=1.3)


def test_a_link_drill_goes_to_the_rank_that_sends():
    (cut,) = plan_drill(running(), DrillRequest("cut-link", source=2, destination=1))
    assert (cut.member, cut.order) == ("m2", Drill(3, "cut-link", 2, -1, peers=(1,)))
    assert drill_words(cut.order) == "cut-link from rank 2 to 1 now"


def test_a_node_is_throttled_in_both_directions():
    orders = {d.member: d.order for d in plan_drill(running(), DrillRequest("throttle-node", node="n1", rate=1e6))}
    assert {name: order.peers for name, order in orders.items()} == {
        "m2": (0, 1),
        "m3": (0, 1),
        "m0": (2, 3),
        "m1": (2, 3),
    }
    with pytest.raises(UsageError, match="one node"):
        plan_drill(running(nodes=1), DrillRequest("throttle-node", node="n0", rate=1e6))


def test_a_node_is_where_its_ranks_are_now():
    """Rank 1 has moved to n1, and then rank 0."""
    state = running()
    state = msgspec.structs.replace(state, members=state.members | {"m1": Member("m1", 1, "n1", Status.RUNNING)})
    request = DrillRequest("throttle-node", node="n0", rate=1e6)
    orders = {d.member: d.order.peers for d in plan_drill(state, request)}
    assert orders == {"m0": (1, 2, 3), "m1": (0,), "m2": (0,), "m3": (0,)}
    state = msgspec.structs.replace(state, members=state.members | {"m0": Member("m0", 0, "n1", Status.RUNNING)})
    with pytest.raises(UsageError, match="no rank is on node n0: no link leads"):
        plan_drill(state, request)
    with pytest.raises(UsageError, match="all ranks are on node n1"):
        plan_drill(state, DrillRequest("throttle-node", node="n1", rate=1e6))


def test_a_rank_without_a_holder_is_named():
    state = running()
    gone = msgspec.structs.replace(state.members["m1"], status=Status.GONE)
    state = msgspec.structs.replace(state, members={**state.members, "m1": gone})
    with pytest.raises(UsageError, match="nobody holds rank 1"):
        plan_drill(state, DrillRequest("kill", 1))
    with pytest.raises(UsageError, match="ending"):
        plan_drill(msgspec.structs.replace(state, exit_code=0), DrillRequest("kill", 0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill:1", "no drill to start with: kill"),
        ("", "no drill to start with"),
        ("never-start", "names no rank"),
        ("never-start:", "names no rank"),
        ("never-start:one", "names no rank"),
        ("never-start:-1", "names no rank"),
        ("never-start:8", "no rank 8"),
        ("wrong-version:" + "9" * 5000, "no rank"),
    ],
)
def test_a_start_drill_that_makes_no_sense(text, says):
    with pytest.raises(UsageError, match=says):
        parse_start_drill(text, world=8)


def test_a_start_drill():
    assert parse_start_drill("wrong-version:7", world=8) == ("wrong-version", 7)


numbers = st.integers(-2, 5)
maybe = st.none() | numbers


@given(
    st.builds(
        DrillRequest,
        st.sampled_from([*DRILLS, "other"]),
        rank=maybe,
        step=numbers,
        steps=numbers,
        factor=st.just(0.0) | st.floats(),
        rate=st.just(0.0) | st.floats(),
        source=maybe,
        destination=maybe,
        node=st.sampled_from(["", "n0", "n7"]),
        how=st.sampled_from(["", "op", "x"]),
        stop=st.booleans(),
    )
)
def test_whatever_is_asked_gives_orders_for_ranks_that_exist_or_one_line(request_):
    try:
        planned = plan_drill(running(), request_)
    except UsageError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert planned
    for directed in planned:
        assert 0 <= directed.order.rank < 4 and directed.order.rank not in directed.order.peers
        assert drill_words(directed.order).startswith(("the end of ", request_.fault))
