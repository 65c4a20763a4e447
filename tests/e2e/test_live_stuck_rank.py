"""A member that lives and does nothing: found while the job runs, replaced on hard evidence only (G-20)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from watched import SCRIPTS, cluster, running, suspects


@pytest.fixture
def quick(tmp_path) -> tuple[object, ...]:
    """A hang is acted on after four seconds."""
    path = tmp_path / "quick.toml"
    path.write_text("hang_s = 0.5\n")
    return ("--settings", path)


def wrong(tmp_path, how: str, *more: object) -> tuple[object, ...]:
    return ("--steps", 200, "--wrong", f"1:60:{how}", "--marker", tmp_path / "marker", *more)


def test_a_rank_that_hangs_is_named_and_replaced_and_the_job_ends_well(tmp_path, quick):
    with running(tmp_path / "run", "live.py", *wrong(tmp_path, "sleep"), options=("--standby", 1, *quick)) as job:
        assert job.finish() == 0, job.text()
    found = job.findings("noncommunication_hang")
    assert [f.get("status", "new") for f in found if f["number"] == found[0]["number"]][0] == "new"
    assert suspects(found[0]) == [[{"rank": 1}]] and found[0]["victims"] == [0, 2]
    (incident,) = job.records("Incident")
    assert (incident["kind"], incident["rank"]) == ("noncommunication_hang", 1)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps_kept"] == 200 and report["false_alarm_s"] == 0
    assert len([f for f in report["findings"] if f["kind"] == "noncommunication_hang"]) == 1


def test_the_evidence_of_a_finding_is_in_its_bundle(tmp_path):
    options = ("--on-hang", "observe")
    with running(tmp_path / "run", "live.py", *wrong(tmp_path, "sleep"), options=options) as job:
        job.until(lambda: job.findings("noncommunication_hang"), "the finding")
        bundle = tmp_path / "run" / job.findings("noncommunication_hang")[0]["bundle"]
        job.until(lambda: len(list(bundle.glob("*.stack.txt"))) == 3 and list(bundle.glob("*.ring")), "the evidence")
        job.stop()
        assert "CheckHang" not in str(job.records("OrderRecord")) and not job.records("Incident")
    stacks = {path.name.split(".")[0]: path.read_text() for path in bundle.glob("*.stack.txt")}
    assert "stand_still" in stacks["m1"] and "stand_still" not in stacks["m0"]
    assert json.loads((bundle / "finding.json").read_text())["kind"] == "noncommunication_hang"
    assert next(bundle.glob("host-*.counters.json")).stat().st_size > 10
    assert (bundle / "m1.ring").stat().st_size > 73728


@pytest.mark.long
def test_a_rank_that_dead_locks_with_itself_is_named_and_left_alone(tmp_path, quick):
    with running(tmp_path / "run", "live.py", *wrong(tmp_path, "lock"), options=("--standby", 1, *quick)) as job:
        job.until(lambda: job.said("stands at a lock of the script"), "the check")
        assert not job.records("Incident")
        job.stop()
    last = job.findings("noncommunication_hang")[-1]
    assert last["layer"] == "application" and any("lock.acquire()" in line for line in last["evidence"])


@pytest.mark.long
@pytest.mark.parametrize("how", ["loop", "data"])
def test_a_rank_that_computes_or_waits_for_its_loader_is_not_replaced(tmp_path, quick, how):
    with running(tmp_path / "run", "live.py", *wrong(tmp_path, how), options=("--standby", 1, *quick)) as job:
        kinds = ("noncommunication_hang", "imbalance")
        job.until(lambda: any(job.findings(kind) for kind in kinds), "a finding")
        with pytest.raises(AssertionError):
            job.until(lambda: job.records("Incident"), "an incident", limit_s=12)
        job.stop()
    if how == "data":
        assert any(f["layer"] == "dataloader" for f in job.findings("noncommunication_hang")), job.text()


@pytest.mark.long
def test_agents_of_several_nodes_do_the_same_over_the_network(tmp_path, quick):
    arguments = ("--steps", 150, "--wrong", "3:60:sleep", "--marker", tmp_path / "marker")
    with cluster(tmp_path, SCRIPTS / "live.py", *arguments, ranks=2, options=quick) as controller:
        assert controller.finish() == 0, controller.text()
    found = controller.findings("noncommunication_hang")
    assert suspects(found[0]) == [[{"rank": 3}]]
    (incident,) = controller.records("Incident")
    assert (incident["rank"], incident["node"], incident["members_changed"]) == (3, "b", 1)
    names = {path.name for path in (tmp_path / "run" / found[0]["bundle"]).iterdir()}
    assert {"host-a.counters.json", "host-b.counters.json", "m3.ring", "m0.stack.txt"} <= names


def test_the_analysis_is_killed_and_loses_no_finding(tmp_path):
    options = ("--on-hang", "observe")
    with running(tmp_path / "run", "live.py", *wrong(tmp_path, "sleep"), options=options) as job:
        job.until(lambda: job.findings("noncommunication_hang"), "the finding")
        pids = analysis_of(job.process.pid)
        for pid in pids:
            pid_kill(pid)
        job.until(lambda: job.said("a new one goes on"), "a new analysis")
        job.until(lambda: set(analysis_of(job.process.pid)) - set(pids), "its process")
        with pytest.raises(AssertionError):
            job.until(lambda: len(new_findings(job)) > 1, "the same finding again", limit_s=6)
        job.stop()
    assert len(new_findings(job)) == 1, job.text()


def new_findings(job) -> list[dict]:
    return [f for f in job.findings("noncommunication_hang") if f.get("status", "new") == "new"]


def analysis_of(parent: int) -> list[int]:
    """The analysis processes of a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and re.search(rb"keepstep\.service\.analysis_process", command):
            found.append(int(path.parent.name))
    return found


def pid_kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
