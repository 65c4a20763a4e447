"""Merging versions of rows, and a simulated fleet whose truth comes back out of its log."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from fleet_data import asked, fleet_of, read_text
from fleet_log import write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import SchemaTooNew, UsageError
from keepstep.fleet.node_shares import spread
from keepstep.intake.hostlist import expand_hosts
from keepstep.records.fleet_schema import TABLES, arrow_schema, empty
from keepstep.store.fleet_manifest import Manifest, read_manifest, write_manifest
from keepstep.store.fleet_merge import merged
from keepstep.store.fleet_writer import FleetWriter

HEAD = "JobID|JobName|State|Submit|Start|End|Partition\n"


def version(job: int, *, state: int, name: str = "", partition: str = "") -> pa.Table:
    """A waiting, running or ended version of one submission."""
    start = "Unknown" if state == 0 else "2026-03-01T10:00:00"
    end = "2026-03-01T11:00:00" if state == 2 else "Unknown"
    word = ("PENDING", "RUNNING", "COMPLETED")[state]
    return read_text(f"{HEAD}{job}|{name}|{word}|2026-03-01T09:00:00|{start}|{end}|{partition}\n").attempts


VERSIONS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(VERSIONS, st.randoms(use_true_random=False))
def test_any_order_of_versions_gives_the_furthest_of_each_job(versions, random):
    tables = [version(job, state=state) for job, state in versions]
    random.shuffle(tables)
    rows = merged("attempts", pa.concat_tables([empty("attempts"), *tables]))
    found = dict(zip(rows["job_id"].to_pylist(), rows["state"].to_pylist(), strict=True))
    furthest = {job: max(state for other, state in versions if other == job) for job, _ in versions}
    assert found == {str(job): ("PENDING", "RUNNING", "COMPLETED")[state] for job, state in furthest.items()}
    assert rows.num_rows == len(furthest)
    assert merged("attempts", pa.concat_tables([rows, rows])).num_rows == rows.num_rows


def test_what_the_winner_leaves_open_is_filled_from_the_other():
    rows = merged(
        "attempts", pa.concat_tables([version(1, state=2, name="llm"), version(1, state=2, partition="train")])
    )
    assert [(row["name"], row["partition"]) for row in rows.to_pylist()] == [("llm", "train")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["n1", "n[1-3]", "", "n[1", "a,b"]), st.integers(0, 64)), max_size=8))
def test_gpus_are_shared_over_the_nodes_and_add_up(attempts):
    table = pa.table(
        {
            "attempt_id": pa.array(range(len(attempts)), pa.int64()),
            "nodes": pa.array([nodes for nodes, _ in attempts], pa.string()),
            "gpus": pa.array([gpus for _, gpus in attempts], pa.int64()),
        }
    )
    rows, bad = spread(table, expand_hosts)
    placed = sum(gpus for nodes, gpus in attempts if nodes not in ("", "n[1"))
    assert sum(rows["gpus"].to_pylist()) == pytest.approx(placed)
    assert bool(bad) == any(nodes == "n[1" for nodes, _ in attempts)


@pytest.mark.parametrize("table", list(TABLES))
def test_every_table_can_be_empty(table):
    assert merged(table, empty(table)).schema.names == arrow_schema(table).names


def test_a_newer_layout_is_refused(tmp_path):
    write_manifest(tmp_path, Manifest(schema="2.0"))
    with pytest.raises(SchemaTooNew):
        read_manifest(tmp_path)


def test_only_one_may_write(tmp_path):
    writer = FleetWriter(tmp_path)
    with pytest.raises(UsageError, match="another import"):
        FleetWriter(tmp_path)
    writer.close()
    FleetWriter(tmp_path).close()


def test_the_truth_of_a_simulated_fleet_comes_back(tmp_path):
    """Every requeue, retry, failure and preemption that was planted is found, and no other."""
    write_log(tmp_path, attempts=8000, rng=np.random.default_rng(5))
    files = [tmp_path / name for name in ("sacct.txt", "health.jsonl", "events.txt")]
    store = fleet_of(tmp_path / "fleet", *files)
    truth = json.loads((tmp_path / "truth.json").read_text())
    (found,) = asked(
        store,
        "SELECT count(*), sum(infrastructure::INT), count(victim_of), "
        "(SELECT sum(retries) FROM job_runs), (SELECT sum(requeues) FROM job_runs) FROM attempt_facts",
    )
    large = "SELECT count(*) FROM attempts JOIN attempt_facts USING (attempt_id) WHERE infrastructure AND gpus > 128"
    failed = asked(store, "SELECT count(*) FROM attempt_facts WHERE infrastructure")[0][0]
    assert found == (truth["attempts"], failed, truth["preempted"], truth["retries"], found[4])
    assert failed - found[4] in (0, 1, 2)  # a failure at the very end has no next life in the log
    assert asked(store, large) == [(truth["failures_large"],)]
