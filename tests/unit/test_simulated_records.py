"""The simulated job says the same whether its agents summarise rings slot by slot or the model does it at once."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.diagnosis.summarise import Summariser
from keepstep.records.summary import HostSample
from keepstep.records.summary_rows import GROUP_ROW, PEER_ROW, STEP_ROW, unpacked
from keepstep.simulation.simulated_layout import Layout
from keepstep.simulation.simulated_records import CALLS, JobModel
from keepstep.simulation.simulated_rings import MemberRing

LAYOUT = Layout(tp=2, pp=2, dp=4, ep=2, ranks_per_node=4)


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_a_ring_and_the_model_agree(rank):
    model = JobModel(LAYOUT, seed=4, step_s=0.5)
    ring, summariser = MemberRing(model, rank), Summariser()
    for step in range(4):
        times = model.times(step)
        ring.write(step, times)
        window = summariser.drain(ring.memory, HostSample(), now_ns=ring.now_ns).window
        expected = model.windows(step, times)[rank]
        mine, theirs = unpacked([window.steps], STEP_ROW), unpacked([expected.steps], STEP_ROW)
        for name in ("duration_us", "own_us", "data_us"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3)
        peers, wanted = (np.sort(unpacked([one.peers], PEER_ROW), order=("lane", "peer")) for one in (window, expected))
        lanes = {(row["lane"], row["peer"]) for row in wanted}
        assert {(row["lane"], row["peer"]) for row in peers} == lanes
        assert peers["wire_us"].sum() == pytest.approx(wanted["wire_us"].sum(), rel=1e-3)
        assert peers["peer_us"].sum() == pytest.approx(wanted["peer_us"].sum(), rel=1e-3)


def test_a_step_has_sixty_four_collectives_in_four_kinds_of_groups():
    model = JobModel(LAYOUT, seed=4, step_s=1.5)
    ring = MemberRing(model, 3)
    ring.write(0, model.times(0))
    window = Summariser().drain(ring.memory, HostSample(), now_ns=ring.now_ns).window
    rows = unpacked([window.groups], GROUP_ROW)
    assert rows["calls"].tolist() == [CALLS] * 4
    assert sorted(rows["lane"].tolist()) == [0, 0, 0, 1]


def test_the_groups_of_a_layout_nest():
    for kind in LAYOUT.kinds():
        rows = LAYOUT.groups(kind)
        assert sorted(rows.ravel().tolist()) == list(range(LAYOUT.world))
    members = [set(row) for row in LAYOUT.groups("dp").tolist()]
    assert all(any(set(row) <= one for one in members) for row in LAYOUT.groups("ep").tolist())


def test_the_same_seed_gives_the_same_job():
    first, second = (JobModel(LAYOUT, seed=9) for _ in range(2))
    assert [first.report(step) for step in range(3)] == [second.report(step) for step in range(3)]
