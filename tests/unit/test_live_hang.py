"""The live analysis on jobs that stand still: the origin is named, victims are not, and who is at work is no fault."""

from __future__ import annotations

import pytest

from keepstep.diagnosis.live import WatchPlan, begin_watch, observe, retire
from keepstep.records.finding import Suspect
from keepstep.simulation.simulated_layout import Layout
from keepstep.simulation.simulated_records import JobModel
from keepstep.simulation.simulated_stall import Stall, stall_reports

NESTED = Layout(tp=2, pp=2, dp=2, ranks_per_node=4)


def stalled(stall: Stall, *, seconds: float = 8.0, layout: Layout = NESTED):
    """(seconds since the job stood still, change) for all that is said of it."""
    model = JobModel(layout, seed=3, step_s=0.2)
    state, said = begin_watch(WatchPlan(world=layout.world)), []
    for step in range(stall.step):
        state, changes = observe(state, model.report(step, profiles=step == 0), now=model.clock_ns / 1e9)
        assert changes == ()
    since = model.clock_ns
    for tick in range(1, int(seconds * 2)):
        now_ns = since + tick * 500_000_000
        reports = stall_reports(layout, stall, since_ns=since, now_ns=now_ns)
        state, changes = observe(state, reports, now=now_ns / 1e9)
        said += [(tick * 0.5, change) for change in changes]
    return state, said


def only(said):
    (found,) = [(after, one) for after, one in said if one.status == "new"]
    return found


@pytest.mark.parametrize("rank", range(8))
def test_a_frozen_rank_is_named_at_once_and_hard(rank):
    _, said = stalled(Stall("freeze", step=20, rank=rank))
    after, live = only(said)
    assert live.finding.kind == "noncommunication_hang"
    assert live.finding.suspects == ((Suspect(rank=rank),),)
    assert live.hard
    assert after <= 2.0
    assert rank not in live.finding.victims
    assert len(live.finding.victims) == 7


@pytest.mark.parametrize("rank", [0, 5])
def test_a_dead_lock_is_named_at_once_and_hard_once_it_has_lasted(rank):
    """What does nothing for half a minute may wait for an upload, and goes on."""
    _, said = stalled(Stall("dead-lock", step=20, rank=rank), seconds=50.0)
    after, live = only(said)
    assert live.finding.suspects == ((Suspect(rank=rank),),)
    assert (live.finding.kind, live.finding.layer) == ("noncommunication_hang", "application")
    assert after <= 4.0
    assert [one.hard for _, one in said][0] is False
    assert min(after for after, one in said if one.hard) > 40.0


def test_a_process_that_is_gone_is_no_hang():
    """Its peers tell of the loss before its agent tells of its end."""
    after, live = only(stalled(Stall("gone", step=20, rank=3))[1])
    assert (live.finding.kind, live.finding.suspects) == ("crash", ((Suspect(rank=3),),))
    assert after <= 2.0
    assert not live.hard


def test_a_loader_that_stops_is_the_loaders():
    after, live = only(stalled(Stall("stop-data", step=20, rank=6))[1])
    assert (live.finding.kind, live.finding.layer) == ("noncommunication_hang", "dataloader")
    assert live.finding.suspects == ((Suspect(rank=6),),)
    assert after <= 5.0
    assert not live.hard


@pytest.mark.parametrize("kind", ["saving", "between-steps", "busy", "compiling"])
def test_a_rank_that_is_at_work_is_no_suspect(kind):
    _, said = stalled(Stall(kind, step=20, rank=0), seconds=40.0)
    assert {one.finding.kind for _, one in said} == {"imbalance"}
    assert all(one.finding.suspects == () for _, one in said)


@pytest.mark.parametrize("pair", [(0, 1), (3, 2), (0, 4)])
def test_a_cut_link_is_one_directed_pair(pair):
    after, live = only(stalled(Stall("cut-link", step=20, rank=pair[0], peer=pair[1]))[1])
    assert (live.finding.kind, live.finding.layer) == ("communication_hang", "hardware_link")
    assert live.finding.suspects == ((Suspect(link=pair),),)
    assert after <= 5.0
    assert not live.hard


@pytest.mark.parametrize(
    "stall", [Stall("cut-link", step=20, rank=3, peer=2), Stall("swallowed", step=20, rank=4, peer=5)]
)
def test_a_link_that_stays_dead_is_hard_evidence(stall):
    said = [one for _, one in stalled(stall, seconds=12.0)[1]]
    assert [one.hard for one in said] == [False, True]
    assert said[0].finding.suspects == said[1].finding.suspects


def test_a_link_that_swallows_bytes_is_not_the_fault_of_who_waits():
    """Rank 4 has written its last bytes to rank 5 and gone on; rank 5 is inside the call and waits for them."""
    live = only(stalled(Stall("swallowed", step=20, rank=4, peer=5))[1])[1]
    assert (live.finding.kind, live.finding.layer) == ("communication_hang", "hardware_link")
    assert live.finding.suspects == ((Suspect(link=(4, 5)),),)
    assert not live.hard


@pytest.mark.parametrize("kind", ["wrong-op", "wrong-shape"])
def test_a_mismatch_names_the_one_who_never_called_that_before(kind):
    live = only(stalled(Stall(kind, step=20, rank=4))[1])[1]
    assert (live.finding.kind, live.finding.layer) == ("collective_mismatch", "application")
    assert live.finding.suspects == ((Suspect(rank=4),),)
    assert not live.hard


def test_a_mismatch_names_one_among_four():
    layout = Layout(tp=4, pp=2, dp=1)
    live = only(stalled(Stall("wrong-op", step=20, rank=6), layout=layout)[1])[1]
    assert live.finding.suspects == ((Suspect(rank=6),),)


def test_two_ranks_that_stop_are_two_findings():
    _, said = stalled(Stall("freeze", step=20, rank=1, ranks=(6,)))
    assert {one.finding.suspects for _, one in said if one.status == "new"} == {
        ((Suspect(rank=1),),),
        ((Suspect(rank=6),),),
    }


def test_a_rank_of_whom_nothing_is_heard_is_silent():
    _, said = stalled(Stall("silent", step=20, rank=2), seconds=10.0)
    assert [one.finding.kind for _, one in said if one.status == "new"] == ["reporter_silent"]
    assert said[-1][1].finding.suspects == ((Suspect(rank=2),),)


def test_a_rank_that_is_frozen_inside_a_collective_is_the_origin():
    _, said = stalled(Stall("freeze-inside", step=20, rank=5))
    live = only(said)[1]
    assert (live.finding.kind, live.finding.suspects) == ("noncommunication_hang", ((Suspect(rank=5),),))
    assert live.hard


def test_a_hang_ends_with_the_next_step():
    model = JobModel(NESTED, seed=3, step_s=0.2)
    state, said = begin_watch(WatchPlan(world=8)), []
    for step in range(20):
        state, _ = observe(state, model.report(step), now=model.clock_ns / 1e9)
    since = model.clock_ns
    for tick in range(1, 8):
        reports = stall_reports(NESTED, Stall("freeze", 20, 3), since_ns=since, now_ns=since + tick * 500_000_000)
        state, changes = observe(state, reports, now=since / 1e9 + tick * 0.5)
        said += changes
    model.clock_ns += 4 * 10**9
    for step in range(20, 23):
        state, changes = observe(state, model.report(step), now=model.clock_ns / 1e9)
        said += changes
    assert [one.status for one in said] == ["new", "ended"]


def test_a_new_membership_ends_what_was_open():
    state, said = stalled(Stall("freeze", step=20, rank=3))
    now_ns = 2 * 10**13
    reports = stall_reports(NESTED, Stall("between-steps", 20, 3), since_ns=now_ns, now_ns=now_ns, generation=2)
    _, changes = observe(state, reports, now=now_ns / 1e9)
    assert [(one.status, one.key) for one in changes] == [("ended", said[0][1].key)]


def test_a_restarted_analysis_does_not_tell_again_and_ends_what_it_was_told():
    _, said = stalled(Stall("freeze", step=20, rank=3))
    known = said[0][1]
    state = begin_watch(WatchPlan(world=8, open=(known,)))
    since = 10**12
    for tick in range(1, 60):
        reports = stall_reports(NESTED, Stall("freeze", 20, 3), since_ns=since, now_ns=since + tick * 500_000_000)
        state, changes = observe(state, reports, now=since / 1e9 + tick * 0.5)
        assert [one.status for one in changes] in ([], ["updated"])
    assert state.findings.keys() == {known.key}


def test_ranks_that_have_ended_are_not_missed():
    model = JobModel(NESTED, seed=3, step_s=0.2)
    state = begin_watch(WatchPlan(world=8))
    for step in range(20):
        state, _ = observe(state, model.report(step), now=model.clock_ns / 1e9)
    state = retire(state, range(8), now=model.clock_ns / 1e9)
    for tick in range(60):
        state, changes = observe(state, (), now=model.clock_ns / 1e9 + tick)
        assert changes == ()


def test_clocks_that_disagree_by_minutes_change_nothing():
    """Only differences of one node's clock are used, so that a node whose clock is wrong looks like the others."""
    import msgspec

    model = JobModel(NESTED, seed=3, step_s=0.2)
    state = begin_watch(WatchPlan(world=8))
    for step in range(40):
        first, second = model.report(step)
        shifted = msgspec.structs.replace(
            second,
            mono_ns=second.mono_ns + 600 * 10**9,
            wall=second.wall - 900,
            windows=tuple(msgspec.structs.replace(w, ended_ns=w.ended_ns + 600 * 10**9) for w in second.windows),
        )
        state, changes = observe(state, (first, shifted), now=model.clock_ns / 1e9)
        assert changes == ()
