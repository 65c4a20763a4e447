"""Which measurement splits the suspects of a finding, and what is left of them: planted faults are found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.diagnosis.probing import NodeResult, PairResult, ProbePlan, narrowed, plan_probe
from keepstep.records.events import Finding, Suspect

WORLD = 8
SLOW = Finding(
    kind="communication_slow",
    number=4,
    layer="hardware_link",
    suspects=((Suspect(link=(1, 2)), Suspect(source=1), Suspect(destination=2)),),
)


def measured(plan: ProbePlan, fault: Suspect, *, noise: float = 1.0) -> list[PairResult]:
    """What a fabric with one slow thing gives for the pairs of `plan`."""

    def rate(a: int, b: int) -> float:
        hit = fault.link == (a, b) or fault.source == a or fault.destination == b
        return 1e6 if hit else 1e9 * (noise if (a + b) % 2 else 1.0)

    return [PairResult(a, b, 1e-4, rate(a, b)) for a, b in plan.pairs]


@given(
    st.integers(0, WORLD - 1),
    st.integers(0, WORLD - 1),
    st.sampled_from(["link", "source", "destination"]),
    st.floats(0.5, 1.0),
)
def test_a_planted_fault_is_what_is_left(a: int, b: int, what: str, noise: float) -> None:
    if a == b:
        return
    things = {"link": Suspect(link=(a, b)), "source": Suspect(source=a), "destination": Suspect(destination=b)}
    finding = Finding(kind="communication_slow", number=1, suspects=(tuple(things.values()),))
    plan = plan_probe(finding, WORLD)
    assert plan is not None and plan.kind == "links" and (a, b) in plan.pairs
    found = narrowed(finding, plan, pairs=measured(plan, things[what], noise=noise))
    assert found.suspects == ((things[what],),)
    assert (found.refers, found.number, found.next_probe) == (1, 0, "")


def test_nothing_slow_is_said_and_blames_nobody() -> None:
    plan = plan_probe(SLOW, WORLD)
    assert plan is not None
    found = narrowed(SLOW, plan, pairs=[PairResult(a, b, 1e-4, 1e9) for a, b in plan.pairs])
    assert (found.kind, found.suspects) == ("undetermined", ())
    assert "nothing is slow now" in found.evidence[1]


def test_a_link_that_gives_no_answer_is_the_slowest_of_all() -> None:
    plan = plan_probe(SLOW, WORLD)
    assert plan is not None
    results = measured(plan, Suspect(link=(1, 2)))
    results = [
        PairResult(1, 2, 0, 0, "no echo within 15 s") if (r.source, r.destination) == (1, 2) else r for r in results
    ]
    found = narrowed(SLOW, plan, pairs=results)
    assert found.suspects == ((Suspect(link=(1, 2)),),)
    assert any("no echo" in line for line in found.evidence)


def test_two_slow_links_are_not_forced_into_one_thing() -> None:
    plan = ProbePlan("links", pairs=((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (2, 0)))
    rates = {(0, 1): 1e6, (2, 3): 1e6}
    results = [PairResult(a, b, 1e-4, rates.get((a, b), 1e9)) for a, b in plan.pairs]
    found = narrowed(SLOW, plan, pairs=results)
    assert set(found.suspects[0]) == {Suspect(link=(0, 1)), Suspect(link=(2, 3))}


def test_two_ranks_cannot_tell_link_and_ends_apart() -> None:
    finding = Finding(kind="communication_slow", number=2, suspects=((Suspect(link=(0, 1)), Suspect(source=0)),))
    plan = plan_probe(finding, 2)
    assert plan is not None
    found = narrowed(finding, plan, pairs=measured(plan, Suspect(link=(0, 1))))
    assert {Suspect(link=(0, 1)), Suspect(source=0), Suspect(destination=1)} <= set(found.suspects[0])


@pytest.mark.parametrize(
    ("value", "layer", "suspects"),
    [(100.0, "application", ((Suspect(rank=3),),)), (40.0, "host_cpu", ((Suspect(node="n1"),),))],
)
def test_a_slow_rank_on_a_good_node_is_its_own_fault(value, layer, suspects) -> None:
    finding = Finding(kind="compute_slow", number=5, layer="host_cpu", suspects=((Suspect(rank=3),),))
    plan = plan_probe(finding, WORLD)
    assert plan is not None and plan.kind == "cpu" and 3 in plan.ranks and len(plan.ranks) > 1
    results = [NodeResult(r, "n1" if r == 3 else "n0", value if r == 3 else 100.0, "loops/s") for r in plan.ranks]
    found = narrowed(finding, plan, nodes=results)
    assert (found.layer, found.suspects) == (layer, suspects)


def test_a_node_is_not_slower_than_itself() -> None:
    finding = Finding(kind="compute_slow", number=5, layer="application", suspects=((Suspect(rank=3),),))
    plan = ProbePlan("cpu", ranks=(3, 0, 1))
    results = [NodeResult(rank, "n0", 40.0 if rank == 3 else 100.0, "loops/s") for rank in plan.ranks]
    found = narrowed(finding, plan, nodes=results)
    assert (found.layer, found.suspects, found.confidence) == (finding.layer, finding.suspects, finding.confidence)
    assert "share the node" in found.evidence[1]
    files = narrowed(finding, ProbePlan("read", ranks=plan.ranks), nodes=results)
    assert files.layer == "storage" and "its files" in files.evidence[1]


def test_a_slow_loader_is_measured_by_reading_and_a_hang_by_stacks() -> None:
    loader = Finding(kind="compute_slow", layer="dataloader", suspects=((Suspect(rank=0),),))
    hang = Finding(kind="noncommunication_hang", suspects=((Suspect(rank=0),),))
    assert plan_probe(loader, 4).kind == "read" and plan_probe(hang, 4).kind == "stacks"


def test_what_no_measurement_narrows_is_not_measured() -> None:
    assert plan_probe(Finding(kind="crash", suspects=((Suspect(rank=0),),)), 4) is None
    assert plan_probe(Finding(kind="imbalance"), 4) is None


def test_a_transfer_that_fails_while_all_others_of_its_rank_pass_is_slow() -> None:
    finding = Finding(kind="communication_slow", number=1, suspects=((Suspect(link=(0, 2)),),))
    results = [PairResult(a, b, 1e-4, 3e9) for a, b in ((0, 1), (1, 0), (1, 2), (2, 0), (2, 1))]
    failed = PairResult(0, 2, 0.0, 0.0, "no transfer within 15 s")
    found = narrowed(finding, ProbePlan("links"), pairs=[failed, *results])
    assert (found.kind, found.suspects) == ("communication_slow", ((Suspect(link=(0, 2)),),))


def test_failed_transfers_are_no_usual_rate() -> None:
    finding = Finding(kind="communication_slow", number=1, suspects=((Suspect(link=(0, 2)),),))
    failed = [PairResult(a, b, 0.0, 0.0, "no echo within 15 s") for a, b in ((0, 2), (0, 1), (2, 1))]
    found = narrowed(finding, ProbePlan("links"), pairs=[*failed, PairResult(1, 2, 1e-4, 3e9)])
    assert "slow against the usual 3000.0 MB/s" in found.evidence[1]
    nothing = narrowed(finding, ProbePlan("links"), pairs=failed)
    assert (nothing.kind, nothing.suspects) == ("undetermined", ())
    assert "no transfer came through" in nothing.evidence[1]
