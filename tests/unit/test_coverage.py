"""The cost of each domain's loss is predicted by the rules that a real loss follows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from test_job_shell import SPEC, StandingClock, leading

from keepstep.control.coverage import Placement, predict
from keepstep.control.domains import Domains, mirror_holders
from keepstep.control.job_state import Tick
from keepstep.errors import UsageError
from keepstep.fleet.coverage_text import coverage_text
from keepstep.records.coverage_records import CoverageRecord, DomainLoss
from keepstep.records.domain_messages import CheckpointWritten, StateKept
from keepstep.records.messages import Address, AgentHello, FirstStep, Hello, StateDigest
from keepstep.service.controller import JobShell
from keepstep.service.coverage_desk import CoverageDesk, CoveragePlan, plan_coverage, shown
from keepstep.service.keeper import Keeper
from keepstep.store.journal import MemoryJournal

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

    def test_each_row_counts_what_is_left_elsewhere(self):
        given = {"standbys": {"a": 1, "d": 2}, "places": {"b": 3}, "replicas": {0: "x", 1: "x", 2: "x", 4: "y"}}
        rows = losses(**given)
        for row in rows.values():
            left = [node for node in "abcd" if node not in row.nodes]
            assert row.standbys_left == sum(given["standbys"].get(node, 0) for node in left)
            assert row.places_left == sum(given["places"].get(node, 0) for node in left)
        assert rows["node=a"].sources == {"replica": (0, 1)}
        assert rows["rack=1"].sources == {"nothing": (0, 1, 2, 3)}

    def test_mirrors_that_go_with_their_rank_are_named(self):
        record = predict(Placement(ranks=RANKS, domains=RACKS, mirrors={rank: (rank + 1) % 6 for rank in RANKS}))
        assert any("rank 0" in note and "node=a" in note for note in record.notes)

    def test_each_node_is_asked_for_its_domains_a_few_times_however_many_there_are(self):
        asked: list[str] = []

        class Counting(Domains, frozen=True):
            def of(self, node: str) -> frozenset[str]:
                asked.append(node)
                return super().of(node)

        nodes = [f"n{number}" for number in range(300)]
        domains = Counting({node: {"rack": str(number % 20)} for number, node in enumerate(nodes)})
        mirrors = {rank: (rank + 1) % 300 for rank in range(300)}
        record = predict(Placement(ranks=dict(enumerate(nodes)), domains=domains, mirrors=mirrors))
        assert len(record.domains) == 320 and len(asked) <= 5 * 300

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


class Tables:
    """The tables in a journal."""

    def __init__(self, journal: MemoryJournal) -> None:
        self.journal = journal

    def all(self) -> list[CoverageRecord]:
        return [event for event in self.journal.replay() if isinstance(event, CoverageRecord)]

    def newest(self) -> tuple[DomainLoss, ...]:
        return self.all()[-1].domains


class TestARunningJob:
    def running(self) -> tuple[JobShell, CoverageDesk, Tables]:
        """Two ranks on two nodes and a standby, through their first step."""
        journal = MemoryJournal()
        keeper, clock = Keeper(journal), StandingClock()
        spec = msgspec.structs.replace(SPEC, nnodes=2)
        shell = JobShell(spec, lambda order: None, keeper=keeper, clock=clock, leadership=leading(SPEC.job, clock))
        desk = CoverageDesk(shell, keeper, clock=clock)
        for node in ("a", "b"):
            shell.feed(AgentHello(node, 1, 1, "1"), node=node)
        for name, member in tuple(shell.state.members.items()):
            address = Address(name, member.node, name, member.node, 1)
            hello = Hello(name, member.rank, 2, 1, address, "1", "2")
            shell.feed(hello, node=member.node, member=name)
        for rank, name in enumerate(("m0", "m1")):
            shell.feed(FirstStep(0, 1), node="ab"[rank], member=name)
        assert shell.state.phase == "running"
        return shell, desk, Tables(journal)

    def write(self, desk: CoverageDesk, version: int) -> None:
        for rank in (0, 1):
            desk.take(CheckpointWritten(rank, version))

    def test_the_distance_between_checkpoints_bounds_what_is_done_again(self):
        _, desk, tables = self.running()
        desk.look()
        assert {row.outcome for row in tables.newest()} == {"restart"}
        self.write(desk, 100)
        desk.look()
        assert {(row.outcome, row.steps_recomputed) for row in tables.newest()} == {("steps_recomputed", 100)}
        self.write(desk, 150)
        desk.look()
        assert {row.steps_recomputed for row in tables.newest()} == {50}

    def test_a_checkpoint_that_is_late_is_seen_by_what_members_say_in_passing(self):
        shell, desk, tables = self.running()
        self.write(desk, 100)
        desk.take(StateDigest(0, 256, "d", "all"))
        desk.look()
        assert {row.steps_recomputed for row in tables.newest()} == {156}
        shell.steps = lambda: {0: 300, 1: 299}
        desk.look()
        assert {row.steps_recomputed for row in tables.newest()} == {200}

    def test_a_table_is_made_only_where_something_changed(self, monkeypatch: pytest.MonkeyPatch):
        made: list[Placement] = []

        def counting(placement: Placement) -> CoverageRecord:
            made.append(placement)
            return predict(placement)

        monkeypatch.setattr("keepstep.service.coverage_desk.predict", counting)
        shell, desk, tables = self.running()
        desk.take(StateDigest(0, 16, "d", "all"))
        desk.look()
        shell.feed(Tick())
        desk.take(StateDigest(0, 32, "d", "all"))
        desk.look()
        assert (len(made), len(tables.all())) == (1, 1)
        for rank in (0, 1):
            desk.take(StateKept(0, rank, "all", False))
        desk.look()
        assert (len(made), len(tables.all())) == (2, 2)
