"""Tables that say where each rank runs: members that are late together, on a host that is slow."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reading_all import findings_of, suspects_of

RANKS, EACH, STEPS = 64, 8, 40


def seconds(seed=0, *, noise=0.02):
    return 0.5 * (1 + noise * np.random.default_rng(seed).standard_normal((RANKS, STEPS)))


def write(folder, values, *, host="host", each=EACH, extra=lambda rank: ""):
    """A CSV with a row a rank and step; ranks fill the hosts one after the other."""
    names = [column for column in ("rank", host, "step", "step_time_ms") if column]
    names += ["stage"] if extra(0) else []
    rows = [",".join(names)]
    for rank, mine in enumerate(values):
        where = f"gpu-{rank // each}," if host else ""
        rows += [f"{rank},{where}{step},{1000 * one:.3f}{extra(rank)}" for step, one in enumerate(mine)]
    (folder / "times.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.parametrize("factor", [1.1, 1.3])
@pytest.mark.parametrize("node", [0, 3, 7])
def test_a_slow_node_is_named_and_not_its_ranks(tmp_path, node, factor):
    values = seconds()
    values[EACH * node : EACH * (node + 1)] *= factor
    (finding,) = findings_of(write(tmp_path, values))
    assert (finding.kind, suspects_of([finding])) == ("compute_slow", [[[{"node": f"gpu-{node}"}]]])
    assert finding.confidence == pytest.approx(0.6)  # stages are not known: one may fill the node
    assert set(finding.victims) == set(range(RANKS)) - set(range(EACH * node, EACH * (node + 1)))


def test_where_stages_are_known_a_slow_node_is_surer(tmp_path):
    values = seconds()
    values[8:16] *= 1.2
    (finding,) = findings_of(write(tmp_path, values, extra=lambda rank: f",{rank // 32}"))
    assert suspects_of([finding]) == [[[{"node": "gpu-1"}]]]
    assert finding.confidence == pytest.approx(0.85)


def test_a_node_that_is_slow_for_a_while(tmp_path):
    values = seconds()
    values[16:24, 10:22] *= 1.5
    (finding,) = findings_of(write(tmp_path, values))
    assert suspects_of([finding]) == [[[{"node": "gpu-2"}]]]
    assert any("steps 10 to 21" in line for line in finding.evidence)


def test_one_slow_rank_of_a_node_is_a_rank(tmp_path):
    values = seconds()
    values[21] *= 1.4
    (finding,) = findings_of(write(tmp_path, values))
    assert suspects_of([finding]) == [[[{"rank": 21}]]]


def test_a_slow_node_and_a_slow_rank_elsewhere(tmp_path):
    values = seconds()
    values[21] *= 1.4
    values[40:48] *= 1.3
    findings = findings_of(write(tmp_path, values, host="Node Name"))
    assert {str(one) for one in suspects_of(findings)} == {"[[{'rank': 21}]]", "[[{'node': 'gpu-5'}]]"}


def test_half_of_the_nodes_are_no_faults(tmp_path):
    values = seconds()
    values[32:] *= 1.2
    assert [finding.kind for finding in findings_of(write(tmp_path, values))] == ["imbalance"]


def test_nothing_slow_on_any_node(tmp_path):
    assert [finding.kind for finding in findings_of(write(tmp_path, seconds()))] == ["healthy"]


def test_ranks_with_hosts_in_json_one_of_two_nodes(tmp_path):
    values = seconds()[:4]
    values[2:] *= 1.4
    rows = [
        {"rank": rank, "node_id": rank // 2, "step": step, "compute_s": one}
        for rank, mine in enumerate(values)
        for step, one in enumerate(mine)
    ]
    (tmp_path / "times.json").write_text(json.dumps(rows))
    (finding,) = findings_of(tmp_path)
    assert suspects_of([finding]) == [[[{"node": "1"}]]]
    assert finding.confidence == pytest.approx(0.6)
