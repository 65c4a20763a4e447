"""The live analysis on simulated jobs: each fault is named, and what is no fault names nobody."""

from __future__ import annotations

import pytest

from keepstep.diagnosis.live import WatchPlan, baseline_of, begin_watch, observe, retire
from keepstep.records.finding import Suspect
from keepstep.simulation.simulated_layout import Layout
from keepstep.simulation.simulated_records import Disturbance, JobModel

NESTED = Layout(tp=2, pp=2, dp=2, ranks_per_node=4)
NO_ALARM = {"imbalance", "healthy", "undetermined"}


def run(*disturbances: Disturbance, steps: int = 60, layout: Layout = NESTED, seed: int = 1, baseline=None):
    """(step at which it was said, what) for everything that the analysis says of such a job."""
    model = JobModel(layout, seed=seed, step_s=0.2, disturbances=disturbances)
    state, said = begin_watch(WatchPlan(world=layout.world, job="j", baseline=baseline)), []
    for step in range(steps):
        reports = model.report(step, profiles=step == 0)
        state, changes = observe(state, reports, now=model.clock_ns / 1e9)
        said += [(step, change) for change in changes]
    return state, said


def alarms(said):
    return [(step, one) for step, one in said if one.status == "new" and one.finding.kind not in NO_ALARM]


def only(said):
    (found,) = alarms(said)
    return found


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
def test_a_slow_rank_is_named_within_ten_steps(rank, factor):
    _, said = run(Disturbance("slow-compute", begin=30, rank=rank, factor=factor))
    step, live = only(said)
    assert live.finding.kind == "compute_slow"
    assert live.finding.suspects == ((Suspect(rank=rank),),)
    assert step <= (40 if factor >= 1.3 else 48)
    assert live.began_step == 30
    assert live.finding.cost == pytest.approx((factor - 1) * 0.2 * 8, rel=0.3)


def test_a_rank_that_was_slow_from_the_start_is_named():
    _, said = run(Disturbance("slow-compute", rank=5, factor=1.4))
    assert only(said)[1].finding.suspects == ((Suspect(rank=5),),)


@pytest.mark.parametrize("heard", [2, 3, 9])
def test_a_fault_behind_a_change_is_named(heard):
    """All are away from step 20 to 26, and first speak in their new membership before, at or behind its end."""
    model = JobModel(NESTED, seed=1, step_s=0.2, disturbances=(Disturbance("slow-compute", begin=60, rank=5),))
    state, said = begin_watch(WatchPlan(world=8, job="j")), []
    for step in range(80):
        now = model.clock_ns / 1e9
        state = retire(state, range(8) if 20 <= step < 26 else (), now=now)
        model.generation = 2 if step >= 20 + heard else 1
        reports = model.report(step, profiles=step == 0)
        state, changes = observe(state, [] if 20 <= step < 20 + heard else reports, now=now)
        said += [(step, change) for change in changes]
    assert only(said)[1].finding.suspects == ((Suspect(rank=5),),)


def test_a_slow_rank_ends_and_can_be_slow_again():
    _, said = run(
        Disturbance("slow-compute", begin=20, end=60, rank=5),
        Disturbance("slow-compute", begin=90, rank=5),
        steps=130,
    )
    assert [one.status for _, one in said] == ["new", "ended", "new"]


def test_a_long_fault_does_not_become_usual():
    _, said = run(Disturbance("slow-compute", begin=30, rank=5, factor=1.1), steps=160)
    assert [one.status for _, one in said if one.key == "slow:5"] == ["new"]


def test_the_loader_of_one_rank():
    _, said = run(Disturbance("slow-data", begin=30, rank=2))
    live = only(said)[1]
    assert (live.finding.kind, live.finding.layer) == ("compute_slow", "dataloader")
    assert live.finding.suspects == ((Suspect(rank=2),),)


def test_a_busy_interpreter_is_the_applications():
    live = only(run(Disturbance("busy-gil", begin=30, rank=2))[1])[1]
    assert (live.finding.kind, live.finding.layer) == ("compute_slow", "application")


def test_a_starved_rank_is_not_called_slow():
    _, said = run(Disturbance("starved", begin=30, rank=2))
    assert alarms(said) == []
    assert ("imbalance", "host_cpu") in {(one.finding.kind, one.finding.layer) for _, one in said}


def test_a_slow_link_is_one_directed_pair():
    _, said = run(Disturbance("throttle-link", begin=30, rank=4, peer=5))
    step, live = only(said)
    assert (live.finding.kind, live.finding.layer) == ("communication_slow", "hardware_link")
    assert live.finding.suspects == ((Suspect(link=(4, 5)),),)
    assert step <= 40


def test_a_link_that_was_slow_from_the_start_is_named():
    live = only(run(Disturbance("throttle-link", rank=4, peer=5, factor=2.0), steps=40)[1])[1]
    assert live.finding.suspects == ((Suspect(link=(4, 5)),),)


def test_a_slow_source_is_a_side():
    live = only(run(Disturbance("throttle-source", begin=30, rank=4))[1])[1]
    assert live.finding.suspects == ((Suspect(source=4),),)


def test_a_slow_node_among_four():
    layout = Layout(tp=2, pp=2, dp=4, ranks_per_node=4)
    live = only(run(Disturbance("throttle-node", begin=30, node="n2"), layout=layout)[1])[1]
    assert live.finding.suspects == ((Suspect(node="n2"),),)


def test_a_part_of_a_slow_nodes_links_is_no_other_fault():
    """For a while only its links to the other stage are slow."""
    layout = Layout(tp=2, pp=2, dp=4, ranks_per_node=2)
    part = [(0, 2), (2, 0), (1, 3), (3, 1)]
    rest = [Disturbance("throttle-link", begin=44, rank=a, peer=b) for a, b in part]
    _, said = run(Disturbance("throttle-node", begin=30, end=44, node="n1"), *rest, layout=layout, steps=70)
    assert only(said)[1].finding.suspects == ((Suspect(node="n1"),),)


def test_links_that_show_a_slow_node_first_are_not_named():
    layout = Layout(tp=2, pp=2, dp=4, ranks_per_node=2)
    early = [Disturbance("throttle-link", begin=30, rank=a, peer=b) for a, b in [(0, 2), (2, 0), (1, 3)]]
    _, said = run(*early, Disturbance("throttle-node", begin=33, node="n1"), layout=layout, steps=70)
    assert only(said)[1].finding.suspects == ((Suspect(node="n1"),),)


def test_two_links_of_a_node_are_named_a_little_later():
    layout = Layout(tp=2, pp=2, dp=4, ranks_per_node=2)
    both = [Disturbance("throttle-link", begin=30, rank=a, peer=b) for a, b in [(0, 2), (2, 6)]]
    _, said = run(*both, layout=layout, steps=70)
    assert {one.finding.suspects for _, one in alarms(said)} == {((Suspect(link=(0, 2)),),), ((Suspect(link=(2, 6)),),)}
    assert all(step <= 45 for step, _ in alarms(said))


def test_one_link_that_stays_slow_of_a_node_is_named():
    layout = Layout(tp=2, pp=2, dp=4, ranks_per_node=2)
    _, said = run(
        Disturbance("throttle-node", begin=30, end=44, node="n1"),
        Disturbance("throttle-link", begin=44, rank=0, peer=2),
        layout=layout,
        steps=80,
    )
    assert [one.finding.suspects for _, one in alarms(said)] == [
        ((Suspect(node="n1"),),),
        ((Suspect(link=(0, 2)),),),
    ]


def begun_and_ended(said):
    return [one.status for _, one in said if one.key.startswith("link:") and one.status != "updated"]


def test_a_link_that_stays_slow_is_one_finding_until_it_is_well():
    _, said = run(Disturbance("throttle-link", begin=30, end=150, rank=4, peer=5), steps=200)
    assert begun_and_ended(said) == ["new", "ended"]
    assert said[-1][0] >= 150


def test_a_step_that_stands_still_does_not_end_the_finding_of_a_link():
    slow = Disturbance("throttle-link", begin=30, end=100, rank=4, peer=5)
    _, said = run(slow, Disturbance("recompiling", begin=45, rank=2, seconds=5.0), steps=140)
    assert begun_and_ended(said) == ["new", "ended"]
    assert said[-1][0] >= 100


def test_in_a_single_ring_side_and_link_cannot_be_told_apart():
    layout = Layout(tp=1, pp=1, dp=8)
    live = only(run(Disturbance("throttle-link", begin=30, rank=3, peer=4), layout=layout)[1])[1]
    assert live.finding.suspects[0][0] == Suspect(link=(3, 4))


def test_two_faults_are_two_findings():
    _, said = run(Disturbance("slow-compute", begin=30, rank=1), Disturbance("throttle-link", begin=30, rank=6, peer=7))
    assert {one.finding.kind for _, one in alarms(said)} == {"compute_slow", "communication_slow"}
    _, said = run(Disturbance("slow-compute", begin=30, rank=1), Disturbance("slow-compute", begin=30, rank=6))
    assert {one.finding.suspects for _, one in alarms(said)} == {((Suspect(rank=1),),), ((Suspect(rank=6),),)}


@pytest.mark.parametrize(
    "kind", ["sequence-lengths", "heavy-last-stage", "garbage-collection", "rotating", "saving", "recompiling", "none"]
)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_no_fault_names_nobody(kind, seed):
    _, said = run(Disturbance(kind, begin=20, seconds=30.0, factor=1.5), steps=140, seed=seed)
    assert alarms(said) == []
    assert all(one.finding.suspects == () for _, one in said)


@pytest.mark.parametrize("seed", [16, 17, 18, 44, 46, 47])
def test_a_run_of_long_sequences_names_nobody(seed):
    """One of two replicas gets the longer ones many times in a row, soon after lengths began to vary."""
    _, said = run(Disturbance("sequence-lengths", begin=60), steps=100, seed=seed)
    assert alarms(said) == []


@pytest.mark.parametrize("dwell", [2, 3, 5])
def test_a_straggler_that_moves_on_names_nobody(dwell):
    _, said = run(Disturbance("rotating", factor=1.5, dwell=dwell), steps=150)
    assert alarms(said) == []


def test_a_heavy_stage_from_the_start_is_imbalance():
    _, said = run(Disturbance("heavy-last-stage", factor=1.6), steps=100)
    assert alarms(said) == []
    assert {one.finding.kind for _, one in said} == {"imbalance"}


def test_a_data_stall_on_all_names_no_rank():
    _, said = run(Disturbance("data-stall", begin=40, end=50, factor=3.0), steps=80)
    assert alarms(said) == []
    assert ("imbalance", "storage", ()) in {
        (one.finding.kind, one.finding.layer, one.finding.suspects) for _, one in said
    }


def test_a_baseline_knows_its_environment():
    state, _ = run(steps=60)
    baseline = baseline_of(state)
    assert baseline.fingerprint.world == 8
    assert baseline.fingerprint.layout == (("collectives", 8, 2), ("messages", 4, 2))
    assert baseline.own_us[0] == pytest.approx(120_000, rel=0.05)


def test_a_job_that_is_slow_from_the_start_is_compared_with_its_baseline():
    baseline = baseline_of(run(steps=60)[0])
    everybody = tuple(Disturbance("slow-compute", rank=rank) for rank in range(8))
    said = [one.finding for _, one in run(*everybody, steps=60, baseline=baseline)[1]]
    assert [(finding.kind, finding.suspects) for finding in said] == [("undetermined", ())]
    assert "earlier run" in said[0].evidence[0]


def test_a_baseline_of_another_environment_is_not_used_and_that_is_said():
    other = Layout(tp=2, pp=2, dp=4, ranks_per_node=4)
    baseline = baseline_of(run(steps=60, layout=other)[0])
    everybody = tuple(Disturbance("slow-compute", rank=rank) for rank in range(8))
    assert run(*everybody, steps=60, baseline=baseline)[1] == []
    live = only(run(Disturbance("slow-compute", rank=5, factor=1.4), baseline=baseline)[1])[1]
    assert any("another environment (world" in line for line in live.finding.evidence)
