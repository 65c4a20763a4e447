"""The controller of a job on two nodes is killed, another one takes over; real processes and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import run_to_end
from launching import LIMIT_S, SCRIPTS, keepstep, one_line, started

from keepstep.errors import NoAnswer, UsageError
from keepstep.records.drills import DrillRequest
from keepstep.service.control_socket import ask_drill
from keepstep.service.remote_controller import take_over

STEPS = 300
PATIENCE_S = 240.0


class Nodes:
    """A controller and two agents with a rank and a standby each, running toy.py."""

    def __init__(self, directory: Path, *script: object) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.out.mkdir()
        words = ("controller", "--nnodes", 2, "--standby", 1, "--port", 0, "--run", "run")
        toy = (SCRIPTS / "toy.py", "--out", self.out, "--steps", STEPS, "--pace", 0.02, *script)
        self.controller = started(*words, *toy, cwd=directory)
        self.address = self.found(self.controller)
        self.agents = [
            started("agent", "--controller", self.address, "--node", node, "--run", node, "--token-file", "run/token",
                    cwd=directory)
            for node in ("a", "b")
        ]  # fmt: skip

    @staticmethod
    def found(controller: subprocess.Popen[str]) -> str:
        assert controller.stderr is not None
        for line in controller.stderr:
            if match := re.search(r"127\.0\.0\.1:\d+", line):
                return match.group()
        raise AssertionError("the controller ended")

    def lines(self, rank: int = 0) -> int:
        log = self.out / f"rank-{rank}.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def kill_controller(self) -> None:
        self.controller.kill()
        self.controller.communicate(timeout=LIMIT_S)

    def take_over(self) -> None:
        self.controller = started("resume", "run", cwd=self.directory)
        assert self.found(self.controller) == self.address

    def finish(self) -> list[int]:
        for process in (self.controller, *self.agents):
            process.communicate(timeout=2 * LIMIT_S)
        return [process.returncode for process in (self.controller, *self.agents)]

    def logs(self) -> dict[int, list[str]]:
        return {
            int(path.stem.split("-")[1]): [line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()]
            for path in sorted(self.out.glob("rank-*.log"))
        }

    def close(self) -> None:
        for process in (self.controller, *self.agents):
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=LIMIT_S)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, *getattr(request, "param", ()))
    yield made
    made.close()


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)


def journal_lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "run" / "journal.jsonl").read_text().splitlines()


def calm(tmp_path: Path) -> dict[int, list[str]]:
    """The logs of the same job undisturbed."""
    return run_to_end(tmp_path / "calm", "--steps", str(STEPS), world=2, standby=0).logs()


def test_members_train_on_and_the_next_controller_sees_the_job_to_its_end(tmp_path, nodes):
    """G-23"""
    until(lambda: nodes.lines() >= 5, "some steps")
    nodes.kill_controller()
    before = nodes.lines()
    until(lambda: nodes.lines() > before + 2, "steps without a controller")
    run = tmp_path / "run"  # asked in this process: a command that starts slowly would find the job at its end
    with pytest.raises(NoAnswer, match="is gone.*keepstep resume"):
        ask_drill(run, DrillRequest("kill", 0))
    nodes.take_over()
    with pytest.raises(UsageError, match="another run"):
        take_over(run)
    assert nodes.finish() == [0, 0, 0]
    assert nodes.logs() == calm(tmp_path)
    samples = [json.loads(line) for line in journal_lines(tmp_path) if '"record":"StepProgress"' in line]
    assert any(0 < sample["step"] <= STEPS for sample in samples), "agents report steps, and no sample was kept"
    assert "has finished" in one_line(keepstep("resume", "run", cwd=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("nodes", [("--hold", "1:9:collective:1", "--marker", "marker")], indirect=True)
@pytest.mark.parametrize("order", ["Abort", "Settle", "Fetch", "Go"])
def test_killed_in_mid_swap(tmp_path, nodes, order):
    """G-23, G-11"""
    marker = tmp_path / "marker.0"
    until(lambda: marker.exists() and marker.read_text(), "the rank in its step")
    os.kill(int(marker.read_text()), signal.SIGKILL)
    journal = tmp_path / "run" / "journal.jsonl"
    until(lambda: f'"kind":"{order}"' in journal.read_text(), order)
    nodes.kill_controller()
    nodes.take_over()
    assert nodes.finish() == [0, 0, 0]
    assert nodes.logs() == calm(tmp_path)


@pytest.mark.parametrize("words", [("nowhere",), (".",)])
def test_only_a_job_that_lost_its_controller_is_taken_over(tmp_path, words):
    assert "run" in one_line(keepstep("resume", *words, cwd=tmp_path))
