"""Jobs that know nothing of keepstep: a suspect is named by stacks and processor time, and the job starts again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from watched import SCRIPTS, cluster, running, suspects


@pytest.fixture
def quick(tmp_path) -> Path:
    path = tmp_path / "quick.toml"
    path.write_text("hang_s = 2.0\n")
    return path


def arguments(tmp_path, wrong: str, steps: int = 260) -> tuple[object, ...]:
    return ("--steps", steps, "--checkpoint", tmp_path / "model.pt", "--wrong", wrong)


def test_a_dead_lock_is_named_and_the_job_goes_on_from_its_checkpoint(tmp_path, quick):
    job_arguments = arguments(tmp_path, "1:100:lock")
    with running(tmp_path / "run", "gloo.py", *job_arguments, options=("--settings", quick)) as job:
        assert job.finish() == 0, job.text()
    first = job.findings("noncommunication_hang")[0]
    assert suspects(first) == [[{"rank": 1}]] and first["layer"] == "application"
    assert first["victims"] == [0, 2] and any("lock.acquire()" in line for line in first["evidence"])
    assert job.said(r"goes on from step \d") and job.said("in attempt 1")


def signal_rank_2(job, tmp_path, number: int) -> None:
    """Once there is a checkpoint."""
    job.until(lambda: (tmp_path / "model.pt").exists(), "a checkpoint")
    started = [r["fact"] for r in job.records("FactRecord") if r["fact"]["kind"] == "MemberStarted"]
    os.kill(next(fact["pid"] for fact in started if fact["rank"] == 2), number)


@pytest.mark.long
def test_a_frozen_rank_is_named_and_the_job_starts_again(tmp_path, quick):
    with running(tmp_path / "run", "gloo.py", *arguments(tmp_path, "9:0:none"), options=("--settings", quick)) as job:
        signal_rank_2(job, tmp_path, signal.SIGSTOP)
        assert job.finish() == 0, job.text()
    finding = job.findings("noncommunication_hang")[0]
    assert suspects(finding) == [[{"rank": 2}]] and "state T" in finding["evidence"][0]
    assert job.said("in attempt 1")


@pytest.mark.long
def test_a_rank_that_is_killed_is_a_crash_until_the_job_has_started_again(tmp_path, quick):
    with running(tmp_path / "run", "gloo.py", *arguments(tmp_path, "9:0:none"), options=("--settings", quick)) as job:
        signal_rank_2(job, tmp_path, signal.SIGKILL)
        assert job.finish() == 0, job.text()
    found = job.records("Finding")
    assert {f["kind"] for f in found} == {"crash"} and suspects(found[0]) == [[{"rank": 2}]]
    assert found[-1]["status"] == "ended" and job.said("in attempt 1")


@pytest.mark.long
def test_a_slow_loader_is_named(tmp_path, quick):
    job_arguments = arguments(tmp_path, "2:40:slow", 100)
    with running(tmp_path / "run", "gloo.py", *job_arguments, options=("--settings", quick)) as job:
        assert job.finish() == 0, job.text()
    finding = job.findings("compute_slow")[0]
    assert suspects(finding) == [[{"rank": 2}]] and finding["layer"] == "dataloader"


@pytest.mark.long
def test_a_healthy_job_gives_no_finding(tmp_path, quick):
    with running(tmp_path / "run", "gloo.py", *arguments(tmp_path, "9:0:none"), options=("--settings", quick)) as job:
        assert job.finish() == 0, job.text()
    assert job.records("Finding") == []


def test_the_node_of_the_suspect_is_left_out_where_there_is_room(tmp_path, quick):
    script = (SCRIPTS / "gloo.py", *arguments(tmp_path, "1:60:lock", 140))
    with cluster(tmp_path, *script, ranks=1, options=("--settings", quick)) as controller:
        assert controller.finish() == 0, controller.text()
    assert suspects(controller.findings("noncommunication_hang")[0]) == [[{"rank": 1}]]
    assert controller.said("node b is excluded")
    started = [r for r in controller.records("OrderRecord") if r["order"]["kind"] == "StartMember"]
    assert {r["target"] for r in started if r["order"]["attempt"] == 1 and r["order"]["rank"] >= 0} == {"a"}
    assert "in attempt 1" in (tmp_path / "a.txt").read_text()


@pytest.mark.long
def test_collectives_that_do_not_match_end_the_job_and_use_no_restart(tmp_path, quick):
    with running(tmp_path / "run", "gloo.py", *arguments(tmp_path, "1:20:size"), options=("--settings", quick)) as job:
        assert job.finish() not in (0, None), job.text()
    assert job.findings("collective_mismatch") and job.said("a new start would come to the same place")
    assert not job.said(r"restart \d of") and not job.records("Incident")
