"""A controller and agents as on several nodes, all on this machine: scripts without keepstep lines."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import LIMIT_S, PLAIN, alive, children_written, keepstep, one_line, pids_of, started, until


class Cluster:
    """A controller with two ranks on two nodes."""

    def __init__(self, directory: Path, *script: object) -> None:
        self.directory = directory
        words = ("controller", "--nnodes", 2, "--port", 0, "--run", "run", "--token-file", "token", "--max-restarts", 1)
        self.controller = started(*words, PLAIN, *script, cwd=directory)
        assert self.controller.stderr is not None
        found = re.search(r"127\.0\.0\.1:\d+", self.controller.stderr.readline())
        assert found is not None
        self.address = found.group()
        self.agents: list[subprocess.Popen[str]] = []

    def agent_words(self, node: str) -> tuple[object, ...]:
        return ("agent", "--controller", self.address, "--node", node, "--run", node, "--token-file", "token")

    def start_agents(self) -> None:
        (self.directory / "keepstep.toml").write_text("controller_patience_s = 0.5\n")
        self.agents = [started(*self.agent_words(node), cwd=self.directory) for node in ("a", "b")]

    def finish(self) -> list[int]:
        """Exit codes: the controller's, then the agents'."""
        for process in (self.controller, *self.agents):
            process.communicate(timeout=LIMIT_S)
        return [process.returncode for process in (self.controller, *self.agents)]

    def close(self) -> None:
        for process in (self.controller, *self.agents):
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=LIMIT_S)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path, *request.param)
    yield made
    made.close()


@pytest.mark.parametrize("cluster", [("--environment", "env", "--fail-rank", 1, "--code", 5)], indirect=True)
def test_two_nodes_run_one_job_and_restart_together(tmp_path, cluster):
    cluster.start_agents()
    assert cluster.finish() == [0, 0, 0]
    ranks = [json.loads((tmp_path / f"env.1.{rank}").read_text()) for rank in (0, 1)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["GROUP_RANK"], r["GROUP_WORLD_SIZE"]) for r in ranks] == [
        ("0", "0", "0", "2"),
        ("1", "0", "1", "2"),
    ]
    assert [r["KEEPSTEP_NODE"] for r in ranks] == ["a", "b"]
    assert ranks[0]["MASTER_PORT"] == ranks[1]["MASTER_PORT"]
    assert ranks[0]["MASTER_PORT"] != json.loads((tmp_path / "env.0.1").read_text())["MASTER_PORT"]
    assert json.loads((tmp_path / "run" / "report.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize("cluster", [("--child", "pids", "--linger", 99)], indirect=True)
def test_a_stopped_controller_stops_all_nodes(tmp_path, cluster):
    """G-16"""
    cluster.start_agents()
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    cluster.controller.send_signal(signal.SIGINT)
    assert cluster.finish() == [130, 130, 130]
    assert [pid for pid in pids_of(tmp_path, "pids", 2) if alive(pid)] == []


@pytest.mark.parametrize("cluster", [("--child", "pids", "--linger", 99)], indirect=True)
def test_agents_of_a_killed_controller_end_their_processes(tmp_path, cluster):
    cluster.start_agents()
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    cluster.controller.kill()
    assert cluster.finish()[1:] == [69, 69]
    assert [pid for pid in pids_of(tmp_path, "pids", 2) if alive(pid)] == []


@pytest.mark.parametrize("cluster", [("--child", "pids", "--linger", 99)], indirect=True)
def test_a_killed_agent_ends_the_job_and_leaves_nothing(tmp_path, cluster):
    cluster.start_agents()
    until(lambda: children_written(tmp_path, "pids", 2), "the ranks")
    cluster.agents[1].kill()
    codes = cluster.finish()
    assert codes[0] == codes[1] != 0
    until(lambda: not any(alive(pid) for pid in pids_of(tmp_path, "pids", 2)), "the end of all processes")


@pytest.mark.parametrize("cluster", [()], indirect=True)
def test_who_does_not_belong_is_refused(tmp_path, cluster):
    (tmp_path / "wrong").write_text("x" * 40)
    (tmp_path / "wrong").chmod(0o600)
    words = cluster.agent_words("a")
    assert "token" in one_line(keepstep(*words[:-1], "wrong", cwd=tmp_path))
    assert "no job" in one_line(keepstep(*words, "--job", "other", cwd=tmp_path))
    assert cluster.controller.poll() is None
