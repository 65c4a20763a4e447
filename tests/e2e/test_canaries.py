"""A job runs small before it widens, and does not widen after a canary that did not come to a clean end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import SCRIPTS, started, until

from keepstep.cli import main

SHORT = str(SCRIPTS / "short.py")


def report_of(directory: Path) -> dict:
    return json.loads((directory / "report.json").read_text())


@pytest.mark.long
def test_a_clean_canary_is_followed_by_the_job(tmp_path):
    words = ["run", "--nproc-per-node", "2", "--canary", "1", "--canary-steps", "3", "--run", "run"]
    command = [sys.executable, "-m", "keepstep.cli", *words, SHORT, "--checkpoints", str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "came to a clean end, the job begins" in done.stderr
    small, whole = report_of(tmp_path / "run" / "canary"), report_of(tmp_path / "run")
    assert (small["world"], small["steps_kept"]) == (1, 3)
    assert (whole["world"], whole["steps_kept"]) == (2, 12)
    log = (tmp_path / "run" / "canary" / "logs" / "m0.log").read_text()
    assert log.count("loss") == 3
    assert sorted(path.name for path in (tmp_path / "kept").iterdir())[-1] == "step-00000012"


@pytest.mark.long
def test_a_loss_that_is_no_number_stops_it(tmp_path):
    words = ["run", "--nproc-per-node", "2", "--canary", "2", "--canary-steps", "5", "--run", "run", SHORT, "--nan"]
    command = [sys.executable, "-m", "keepstep.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "the loss is nan" in last and "the job was not started" in last
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["canary"]


def over_nodes(
    directory: Path, *words: object, nodes: str = "ab"
) -> tuple[subprocess.Popen[str], list[subprocess.Popen[str]]]:
    """A controller for two nodes whose canary needs one, and its agents; the second starts when the first is in it."""
    controller = started(
        *("controller", "--port", 0, "--nnodes", 2, "--nproc-per-node", 1, "--canary", 1, "--canary-steps", 5),
        *("--run", "run", SHORT, *words),
        cwd=directory,
    )
    assert controller.stderr is not None
    port = next(line for line in controller.stderr if "waits for" in line).split(",")[0].rsplit(":", 1)[1]
    token = directory / "run" / "token"
    until(token.is_file, "the token")
    agents = []
    for name in nodes:
        command = ("agent", "--controller", f"127.0.0.1:{port}", "--token-file", token, "--node", name, "--run", name)
        agents.append(started(*command, cwd=directory))
        until((directory / "a" / "canary" / "logs" / "m0.log").is_file, "the member of the canary")
    return controller, agents


@pytest.mark.long
def test_over_nodes_the_agents_come_back_for_the_job(tmp_path):
    controller, agents = over_nodes(tmp_path)
    _, said = controller.communicate(timeout=300)
    assert controller.returncode == 0, said
    for agent in agents:
        agent.communicate(timeout=60)
        assert agent.returncode == 0
    assert report_of(tmp_path / "run" / "canary")["steps_kept"] == 5
    assert report_of(tmp_path / "run")["steps_kept"] == 12
    assert (tmp_path / "a" / "canary").is_dir() and not (tmp_path / "b" / "canary").exists()


@pytest.mark.long
def test_over_nodes_a_loss_that_is_no_number_stops_it(tmp_path):
    controller, agents = over_nodes(tmp_path, "--nan", nodes="a")
    _, said = controller.communicate(timeout=300)
    assert controller.returncode == 1
    assert "the loss is nan in m0.log on a" in said.strip().splitlines()[-1]
    agents[0].communicate(timeout=60)
    assert agents[0].returncode == 1
    assert not (tmp_path / "run" / "journal.jsonl").exists()


@pytest.mark.long
def test_over_nodes_an_agent_does_not_wait_for_the_job_behind_a_rejected_canary(tmp_path):
    """The canary ended with 0 and made too few steps."""
    controller, agents = over_nodes(tmp_path, "--steps", 3, nodes="a")
    _, said = controller.communicate(timeout=300)
    assert controller.returncode == 1
    assert "it made 3 of 5 steps" in said.strip().splitlines()[-1]
    _, heard = agents[0].communicate(timeout=120)
    assert agents[0].returncode == 1 and "no controller came" not in heard, heard


def test_bad_canaries_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, says in (
        (["run", "--nproc-per-node", "2", "--canary", "3", SHORT], "a canary of 3 ranks for a job of 2"),
        (["run", "--canary", "0", SHORT], "--canary"),
        (["run", "--canary", "1", "--canary-steps", "0", SHORT], "--canary-steps"),
        (["controller", "--nnodes", "2", "--nproc-per-node", "2", "--canary", "3", SHORT], "on nodes of 2"),
        (["controller", "--job", "a-canary-3", SHORT], "the name of a canary"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and says in said[0]
    assert list(tmp_path.iterdir()) == []
