"""The cost of each domain's loss is predicted by the rules that a real loss follows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from keepstep.control.coverage import Placement, predict
from keepstep.control.domains import Domains, mirror_holders
from keepstep.errors import UsageError
from keepstep.fleet.coverage_text import coverage_text
from keepstep.records.coverage_records import DomainLoss
from keepstep.service.coverage_desk import CoveragePlan, plan_coverage, shown

RACKS = Domains({"a": {"rack": "1"}, "b": {"rack": "1"}, "c": {"rack": "2"}, "d": {"rack": "2"}})
RANKS = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
ALIKE = dict.fromkeys(RANKS, "all")
ALONE = {rank: f"part {rank}" for rank in RANKS}


def losses(**given) -> dict[str, DomainLoss]:
    defaults = {"ranks": RANKS, "domains": RACKS, "standbys": {"d": 4}, "replicas": ALIKE}
    return {row.domain: row for row in predict(Placement(**{**defaults, **given})).domains}


class TestOutcomes:
    def test_replicas_and_standbys_elsewhere_keep_the_job_in_step(self):
        row = losses()["rack=1"]
        assert (row.outcome, row.ranks, row.standbys_left) == ("kept_in_step", (0, 1, 2, 3), 4)
        assert row.sources == {"replica": (0, 1, 2, 3)}
        assert "results differ" in row.why

    def test_with_a_checkpoint_the_own_state_of_lost_ranks_comes_from_there(self):
        row = losses(behind=40)["node=a"]
        assert (row.outcome, row.steps_recomputed) == ("steps_recomputed", 40)

    def test_mirrors_keep_state_without_replicas(self):
        mirrors = mirror_holders(Placement(ranks=RANKS, domains=RACKS).ranks_by_node(), RACKS)
        rows = losses(replicas=ALONE, mirrors=mirrors, own_holders=mirrors)
        assert rows["rack=1"].outcome == "kept_in_step"
        assert rows["rack=1"].sources == {"mirror": (0, 1, 2, 3)}

    def test_state_of_which_nothing_is_left_restarts_the_job_or_ends_it(self):
        assert losses(replicas=ALONE, restarts_left=1)["node=a"].outcome == "restart"
        assert losses(replicas=ALONE, restarts_left=0)["node=a"].outcome == "stop"
        assert losses(replicas=ALONE, behind=7)["node=a"].steps_recomputed == 7

    def test_unknown_state_is_taken_for_lost(self):
        assert losses(replicas={}, restarts_left=1)["node=a"].outcome == "restart"

    def test_too_few_machines_wait_or_stop(self):
        assert losses(standbys={"d": 3})["rack=1"].outcome == "stop"
        assert losses(standbys={"d": 3}, waits=True)["rack=1"].outcome == "wait"
        assert losses(standbys={"d": 3}, places={"c": 1})["rack=1"].outcome == "kept_in_step"

    def test_standbys_that_go_with_the_domain_do_not_count(self):
        assert losses(standbys={"a": 2, "b": 2, "d": 1})["rack=1"].standbys_left == 1

    def test_the_loss_of_everybody_needs_a_checkpoint(self):
        domains = Domains({node: {"power": "x"} for node in "abc"})
        given = {"domains": domains, "standbys": {"d": 6}}
        assert losses(**given, restarts_left=1)["power=x"].outcome == "restart"
        assert losses(**given, behind=9)["power=x"].outcome == "steps_recomputed"

    def test_a_domain_without_ranks_costs_nothing(self):
        assert losses()["node=d"].outcome == "kept_in_step"


class TestTheTable:
    def test_the_worst_comes_first_and_what_no_placement_avoids_is_named(self):
        domains = Domains({node: {**RACKS.labels[node], "release": "7"} for node in "abcd"})
        record = predict(Placement(ranks=RANKS, domains=domains, standbys={"d": 4}, replicas=ALIKE))
        assert record.domains[0].domain == "release=7" and record.domains[0].outcome == "stop"
        assert record.everywhere == ("release=7",)

    def test_mirrors_that_go_with_their_rank_are_named(self):
        record = predict(Placement(ranks=RANKS, domains=RACKS, mirrors={rank: (rank + 1) % 6 for rank in RANKS}))
        assert any("rank 0" in note and "node=a" in note for note in record.notes)

    def test_the_text_says_that_it_is_a_prediction(self):
        text = "\n".join(coverage_text(predict(Placement(ranks=RANKS, domains=RACKS, replicas=ALIKE))))
        assert text.startswith("predicted, not measured") and "0-3" in text


class TestPlans:
    @pytest.fixture
    def racks(self, tmp_path: Path) -> tuple[str, ...]:
        (tmp_path / "racks.toml").write_text('[rack]\nr1 = "n[0-1]"\nr2 = "n[2-3]"\n')
        return (str(tmp_path / "racks.toml"),)

    def test_a_job_is_dealt_to_the_nodes_of_the_file(self, racks: tuple[str, ...]):
        record = plan_coverage(racks, CoveragePlan(world=6, per_node=2, spare=1, standby=1))
        rows = {row.domain: row for row in record.domains}
        assert rows["rack=r1"].ranks == (0, 1, 2, 3)
        assert rows["rack=r2"].nodes == ("n2", "n3")
        assert rows["rack=r1"].standbys_left == 4

    def test_shards_are_dealt_so_that_replicas_are_far_apart(self, racks: tuple[str, ...]):
        plan = CoveragePlan(world=8, per_node=2, replicas=2, standby=2)
        rows = {row.domain: row for row in plan_coverage(racks, plan).domains}
        assert rows["rack=r1"].sources == {"replica": (0, 1, 2, 3)}

    def test_json_says_that_it_is_a_prediction(self, racks: tuple[str, ...]):
        record = plan_coverage(racks, CoveragePlan(world=4, per_node=2))
        table = json.loads(shown(record, json=True))
        assert table["predicted"] is True and table["domains"][0]["outcome"] == "stop"

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"world": 7}, "7 ranks, 2 on each node"),
            ({"world": 10}, "5 nodes are needed"),
            ({"spare": 2}, "6 nodes are needed"),
            ({"replicas": 3}, "3 replicas of 8 ranks"),
        ],
    )
    def test_nonsense_is_refused(self, racks: tuple[str, ...], changes: dict, says: str):
        plan = msgspec.structs.replace(CoveragePlan(world=8, per_node=2), **changes)
        with pytest.raises(UsageError, match=says):
            plan_coverage(racks, plan)
