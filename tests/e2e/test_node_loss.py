"""Whole nodes are lost, by drills with known answers: one incident, standbys on other nodes (G-24)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusters import Cluster, toy
from drill_answers import answer_of, right, verdict_of

from keepstep.records.drills import DrillRequest

SHAPE = ("--nproc-per-node", 1, "--standby", 1)
ENDLESS = ("--steps", 1_000_000, "--pace", 0.02)
INTERRUPTED = 130


def logged(out: Path, rank: int) -> int:
    path = out / f"rank-{rank}.log"
    return len(path.read_text().splitlines()) if path.exists() else 0


def named(cluster: Cluster, request: DrillRequest) -> bool:
    answer = answer_of(request)
    return any(right(verdict_of(r), answer) for kind in ("Finding", "Incident") for r in cluster.records(kind))


def goes_on(cluster: Cluster, out: Path, *, incidents: int) -> None:
    """Wait for the repair, for more steps after it, and end the job."""
    cluster.until(lambda: len(cluster.records("Incident")) >= incidents, "the repair")
    before = logged(out, 0)
    cluster.until(lambda: logged(out, 0) > before + 2, "steps after it")
    assert cluster.interrupt() == INTERRUPTED


@pytest.mark.long
def test_a_node_is_lost_and_its_ranks_go_to_another_one(tmp_path):
    """One incident with two ranks; what the loss would cost was said beforehand."""
    out = tmp_path / "out"
    words = ("--nproc-per-node", 2, "--standby", 2)
    with Cluster(tmp_path, nnodes=2, words=words, script=toy(out, *ENDLESS)) as cluster:
        cluster.agent("a", "--domain", "rack=r1")
        cluster.agent("b", "--domain", "rack=r2")
        cluster.until(lambda: cluster.text().count("is warm") >= 4, "standbys")
        cluster.until(lambda: cluster.records("CoverageRecord")[-1:], "the table of predicted losses")
        assert "predicted" in cluster.keepstep("report", cluster.directory)
        assert "rack=r2" in cluster.keepstep("plan", "coverage", "--run", cluster.directory)
        cluster.keepstep("drill", "lose-node", "--node", "b", "--run", cluster.directory)
        goes_on(cluster, out, incidents=1)
        (incident,) = cluster.report["incidents"]
        assert (incident["ranks"], incident["domain"], incident["node"]) == ([2, 3], "node=b", "b")
        assert incident["members_changed"] == 2 and incident["injected"] is not None
        assert named(cluster, DrillRequest("lose-node", node="b"))
        taken = [o for o in cluster.records("OrderRecord") if o["order"]["kind"] == "Welcome" and o["order"]["joiner"]]
        assert [record["node"] for record in taken] == ["a", "a"]


@pytest.mark.long
def test_a_rack_is_lost_and_named(tmp_path):
    """A node that joined late has the standbys that are taken."""
    out = tmp_path / "out"
    with Cluster(tmp_path, nnodes=3, words=("--nproc-per-node", 1), script=toy(out, *ENDLESS)) as cluster:
        for node, rack in (("a", "r1"), ("b", "r2"), ("c", "r2")):
            cluster.agent(node, "--domain", f"rack={rack}")
        cluster.until(lambda: logged(out, 0) > 2, "some steps")
        cluster.agent("d", "--domain", "rack=r1")
        cluster.agent("e", "--domain", "rack=r1")
        cluster.until(lambda: cluster.text().count("is warm") >= 2, "the standbys of the late nodes")
        cluster.keepstep("drill", "lose-domain", "--domain", "rack=r2", "--run", cluster.directory)
        goes_on(cluster, out, incidents=2)
        assert {i["domain"] for i in cluster.report["incidents"]} == {"node=b", "node=c"}
        assert named(cluster, DrillRequest("lose-domain", domain="rack=r2"))


@pytest.mark.long
def test_a_bad_release_is_the_common_suspect(tmp_path):
    out = tmp_path / "out"
    with Cluster(tmp_path, nnodes=3, words=("--nproc-per-node", 1), script=toy(out, *ENDLESS)) as cluster:
        for node, release in (("a", "old"), ("b", "new"), ("c", "new")):
            cluster.agent(node, "--domain", f"release={release}")
        request = DrillRequest("bad-release", domain="release=new")
        cluster.until(lambda: logged(out, 0) > 2, "some steps")
        cluster.keepstep("drill", "bad-release", "--domain", request.domain, "--run", cluster.directory)
        cluster.until(lambda: named(cluster, request), "the finding about the release")
        cluster.keepstep("drill", "bad-release", "--domain", request.domain, "--stop", "--run", cluster.directory)
        assert cluster.interrupt() == INTERRUPTED
        assert any(f["suspects"] == [["domain release=new"]] for f in cluster.report["findings"])


@pytest.mark.long
def test_with_fewer_machines_the_job_waits_and_a_late_agent_helps(tmp_path):
    out = tmp_path / "out"
    words = ("--nproc-per-node", 1, "--on-shortage", "wait")
    with Cluster(tmp_path, nnodes=2, words=words, script=toy(out, *ENDLESS)) as cluster:
        cluster.agent("a")
        cluster.agent("b")
        cluster.until(lambda: logged(out, 0) > 2, "some steps")
        os.kill(cluster.agent_of("b").pid, signal.SIGKILL)
        cluster.until(lambda: "fewer machines than members" in cluster.text(), "the line about the shortage")
        cluster.agent("b")  # it comes back: as a new node, with other members
        goes_on(cluster, out, incidents=1)
        (incident,) = cluster.report["incidents"]
        assert "no machine was left" in incident["note"]
        assert cluster.text().count("fewer machines than members") == 1


@pytest.mark.long
def test_an_agent_that_is_silent_is_a_lost_node_and_is_fenced_when_it_wakes(tmp_path):
    """G-8"""
    out = tmp_path / "out"
    settings = tmp_path / "settings.toml"
    settings.write_text("silence_s = 4.0\n")
    with Cluster(tmp_path, nnodes=2, words=("--settings", settings, *SHAPE), script=toy(out, *ENDLESS)) as cluster:
        cluster.agent("a")
        cluster.agent("b")
        cluster.until(lambda: cluster.text().count("is warm") >= 2, "standbys")
        silent = cluster.agent_of("b")
        os.kill(silent.pid, signal.SIGSTOP)
        cluster.until(lambda: "node b is lost" in cluster.text(), "the loss of the silent node")
        cluster.until(lambda: cluster.records("Incident"), "the repair")
        os.kill(silent.pid, signal.SIGCONT)
        assert silent.wait(90) != 0
        goes_on(cluster, out, incidents=1)
        assert len(cluster.report["incidents"]) == 1
