"""A real job across the fabric: its flows get ways of their own, and a spine that swallows them is left in mid-run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fabric_lab import Fabric, FabricPlan

ROOT = Path(__file__).parents[2]
KEEPSTEP = [sys.executable, "-m", "keepstep.cli"]
NBYTES, STEPS = 600_000, 60


def until(reached: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class PlannedJob:
    """A controller beside the fabric, an agent with one rank on each host."""

    def __init__(self, fabric: Fabric, scratch: Path, *, stage: str, nbytes: int = NBYTES) -> None:
        """`stage` "" is a job without a plan."""
        self.fabric, self.scratch = fabric, scratch
        self.run, self.took = scratch / "run", scratch / "took"
        self.took.mkdir()
        (scratch / "topology.yaml").write_text("keepstep_topology: 1\nclos: {hosts: 8, hosts_per_leaf: 4, spines: 4}\n")
        hops = "".join(f'"{fabric.spine_address(s, leaf=leaf)}" = "spine{s}"\n' for s in range(4) for leaf in range(2))
        (scratch / "traffic.toml").write_text(f'topology = "topology.yaml"\nstage = "{stage}"\n[hops]\n{hops}')
        script = [str(ROOT / "bench/jobs/flows.py"), str(nbytes), str(STEPS), str(self.took)]
        traffic = ["--traffic", str(scratch / "traffic.toml")] if stage else []
        listen = ["--host", fabric.management, "--port", "29400", "--run", str(self.run)]
        self.log = open(scratch / "controller.log", "w+")  # noqa: SIM115
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.controller = fabric.start(
            fabric.manage,
            [*KEEPSTEP, "controller", "--nnodes", "8", *listen, *traffic, *script],
            stderr=self.log,
            stdout=subprocess.DEVNULL,
            env=self.environment,
        )
        until(lambda: (self.run / "token").exists())
        for host in fabric.hosts:
            self.agent(host.number)

    def agent(self, number: int) -> None:
        host = self.fabric.hosts[number]
        reach = ["--controller", f"{self.fabric.management}:29400", "--token-file", str(self.run / "token")]
        where = ["--node", f"h{number}", "--address", host.address, "--run", str(self.scratch / f"agent{number}")]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.fabric.start(host.namespace, [*KEEPSTEP, "agent", *reach, *where], env=self.environment, **quiet)

    def steps(self, rank: int = 0) -> list[list]:
        path = self.took / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self) -> str:
        code = self.controller.wait(timeout=240)
        self.log.seek(0)
        said = self.log.read()
        assert code == 0, said
        return said

    def journal(self, kind: str) -> list[dict]:
        lines = (self.run / "journal.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record.get("record") == kind]

    def weights(self) -> str:
        return self.journal("JobEnded")[0]["weights_sha256"]


@pytest.mark.long
def test_a_job_keeps_its_flows_apart_and_leaves_a_spine_that_swallows_them(fabrics, tmp_path: Path) -> None:
    fabric = fabrics(FabricPlan(host_mbit=50, uplink_mbit=50))
    job = PlannedJob(fabric, tmp_path, stage="low_priority")
    until(lambda: len(job.steps()) >= 30)
    sent = [fabric.uplink_bytes(leaf) for leaf in range(2)]
    until(lambda: len(job.steps()) >= 36)
    for leaf in range(2):
        after = fabric.uplink_bytes(leaf)
        moved = [after[spine] - sent[leaf][spine] for spine in range(4)]
        assert min(moved) > 0.5 * max(moved), "every spine carries one of the four flows"
    fabric.swallow(1)
    said = job.finish()
    assert "is in force on all 8 members" in said
    assert len(job.steps()) == STEPS
    changes = job.journal("TrafficChange")
    assert changes[0]["added"] == 8 and changes[0]["max_load"] == 1
    assert any({"leaf0>spine1", "leaf1>spine1"} <= set(change.get("links", ())) for change in changes)


@pytest.mark.long
def test_a_job_without_a_plan_leaves_a_spine_that_swallows_its_bytes(fabrics, tmp_path: Path) -> None:
    """Which spine a link takes is left to chance; the links that are made anew come through over the other spines."""
    fabric = fabrics(FabricPlan(host_mbit=50, uplink_mbit=50))
    job = PlannedJob(fabric, tmp_path, stage="")
    until(lambda: len(job.steps()) >= 30)
    fabric.swallow(1)
    fabric.swallow(2)
    said = job.finish()
    assert len(job.steps()) == STEPS
    assert "their processes live" in said
    assert {finding["kind"] for finding in job.journal("Finding")} == {"communication_hang"}


@pytest.mark.long
def test_flows_leave_a_path_that_became_slow(fabrics, tmp_path: Path) -> None:
    """One uplink falls to a tenth: its flow, and no other one, goes elsewhere; the uplink is hardly used any more."""
    fabric = fabrics(FabricPlan(host_mbit=200, uplink_mbit=200))
    job = PlannedJob(fabric, tmp_path, stage="low_priority", nbytes=8_000_000)  # more than a socket's buffer holds
    until(lambda: len(job.steps()) >= 25)
    fabric.slow_uplink(0, 1, mbit=20)
    slow = len(job.steps())

    def changed() -> dict | None:
        found = [change for change in job.journal("TrafficChange") if "leaf0>spine1" in change.get("links", ())]
        return found[0] if found else None

    until(lambda: changed() is not None)
    until(lambda: len(job.steps()) > slow + 8)
    at = len(job.steps())
    sent = fabric.uplink_bytes(0)
    until(lambda: len(job.steps()) >= min(at + 6, STEPS))
    after = fabric.uplink_bytes(0)
    moved = {spine: after[spine] - sent[spine] for spine in range(4)}
    assert moved[1] < 0.3 * max(moved.values()), moved
    change = changed()
    assert change is not None and 1 <= change["moved"] <= 2, "the flow, and what comes back over its connection"
    job.finish()
    assert len(job.steps()) == STEPS


@pytest.mark.long
def test_advice_changes_nothing_but_says_what_it_would_do(fabrics, tmp_path: Path) -> None:
    fabric = fabrics(FabricPlan(host_mbit=200, uplink_mbit=200))
    job = PlannedJob(fabric, tmp_path, stage="advise")
    said = job.finish()
    assert "plans are only told" in said
    assert "would do: 8 flows between leaves get ways of their own" in said
    assert not any(change["applied"] for change in job.journal("TrafficChange") if "applied" in change)
    assert all(order["order"]["kind"] != "TakePaths" for order in job.journal("OrderRecord"))
