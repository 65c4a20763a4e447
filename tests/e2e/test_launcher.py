"""`keepstep run` with scripts that know nothing of keepstep: environment, output, exit codes, no leftovers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launching import LIMIT_S, MEMBER, PLAIN, alive, children_written, keepstep, pids_of, started, until


def environments(directory: Path, attempt: int, world: int) -> list[dict[str, str]]:
    return [json.loads((directory / f"env.{attempt}.{rank}").read_text()) for rank in range(world)]


def test_a_plain_script_runs_as_under_torchrun(tmp_path):
    done = keepstep("run", "--nproc-per-node", 2, PLAIN, "--environment", "env", "--say", "hello", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    first, second = environments(tmp_path, 0, 2)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    (run,) = (tmp_path / "keepstep-runs").iterdir()
    assert str(run.relative_to(tmp_path)) in done.stderr
    assert json.loads((run / "report.json").read_text())["exit_code"] == 0
    assert {log.read_text() for log in (run / "logs").glob("m*.log")} == {"hello\n"}


def test_a_failed_attempt_is_started_again_on_another_port(tmp_path):
    options = ("--nproc-per-node", 2, "--max-restarts", 2)
    done = keepstep("run", *options, PLAIN, "--environment", "env", "--fail-rank", 1, "--code", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[rank 1] ValueError: a mistake in the script" in done.stderr
    first = json.loads((tmp_path / "env.0.1").read_text())
    assert first["MASTER_PORT"] != environments(tmp_path, 1, 2)[1]["MASTER_PORT"]
    assert not (tmp_path / "env.2.0").exists()


@pytest.mark.parametrize(("restarts", "attempts"), [(0, 1), (1, 2)])
def test_the_exit_code_of_the_script_is_passed_on(tmp_path, restarts, attempts):
    options = ("--nproc-per-node", 2, "--max-restarts", restarts)
    script = (PLAIN, "--environment", "env", "--fail-rank", 0, "--fail-attempts", 9, "--code", 43)
    done = keepstep("run", *options, *script, cwd=tmp_path)
    assert done.returncode == 43, done.stderr
    assert len(list(tmp_path.glob("env.*.0"))) == attempts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path, number):
    """G-16"""
    job = started("run", "--nproc-per-node", 2, PLAIN, "--child", "pids", "--linger", 99, cwd=tmp_path)
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    job.send_signal(number)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 128 + number and "Traceback" not in errors, errors
    assert [pid for pid in pids_of(tmp_path, "pids", 2) if alive(pid)] == []


def test_a_second_signal_does_not_wait_for_a_deaf_rank(tmp_path):
    """G-16"""
    job = started("run", PLAIN, "--child", "pids", "--deaf", "--linger", 99, cwd=tmp_path)
    until(lambda: children_written(tmp_path, "pids", 1), "the rank")
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=LIMIT_S)
    assert job.returncode in (130, 143)
    assert [pid for pid in pids_of(tmp_path, "pids", 1) if alive(pid)] == []


def test_a_killed_launcher_leaves_nothing(tmp_path):
    """G-16: members and what they started end with the launcher, even if it is killed."""
    job = started("run", "--nproc-per-node", 2, "--run", "run", PLAIN, "--child", "pids", "--linger", 99, cwd=tmp_path)
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    job.kill()
    job.communicate(timeout=LIMIT_S)
    until(lambda: not any(alive(pid) for pid in pids_of(tmp_path, "pids", 2)), "the end of all processes")
    report = keepstep("report", "run", cwd=tmp_path)
    assert report.returncode == 0 and "cut off" in report.stdout


def test_a_child_that_outlives_its_rank_is_ended(tmp_path):
    """G-16"""
    done = keepstep("run", PLAIN, "--child", "pids", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [pid for pid in pids_of(tmp_path, "pids", 1) if alive(pid)] == []


def test_a_rank_that_dies_by_a_signal_gives_128_and_the_signal(tmp_path):
    options = ("--nproc-per-node", 2, "--max-restarts", 0)
    job = started("run", *options, PLAIN, "--child", "pids", "--linger", 99, cwd=tmp_path)
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    os.kill(pids_of(tmp_path, "pids", 2)[0], signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    assert job.returncode == 137
    assert [pid for pid in pids_of(tmp_path, "pids", 2) if alive(pid)] == []


def test_members_report_what_they_kept(tmp_path):
    done = keepstep("run", "--nproc-per-node", 2, "--run", "run", MEMBER, "--steps", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["steps_kept"], report["weights_sha256"], report["incidents"]) == (5, "ab" * 32, [])
    printed = json.loads(keepstep("report", "run", "--format", "json", cwd=tmp_path).stdout)
    assert printed == report


def test_settings_of_the_directory_are_used(tmp_path):
    (tmp_path / "keepstep.toml").write_text("nproc_per_node = 2\nrun_root = 'here'\n")
    done = keepstep("run", PLAIN, "--environment", "env", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(environments(tmp_path, 0, 2)) == 2 and len(list((tmp_path / "here").iterdir())) == 1
