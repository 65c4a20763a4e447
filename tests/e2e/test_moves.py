"""Planned moves in real jobs: the same weights, losses, samples and random numbers as without (G-2, G-7, G-22)."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from jobs import SCRIPTS, RunningJob, run_to_end
from launching import LIMIT_S, keepstep, started
from layout_jobs import LayoutJob, by_torchrun

STEPS = ("--steps", "90")


def lines(job_out: Path, rank: int) -> list[str]:
    log = job_out / f"rank-{rank}.log"
    return log.read_text().splitlines() if log.exists() else []


def until(condition, what: str, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def pids(job_out: Path, rank: int) -> list[str]:
    """The processes that logged steps of a rank, in order."""
    return list(dict.fromkeys(line.rsplit(" ", 1)[1] for line in lines(job_out, rank)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "moving"),
    [
        pytest.param((), (1,), id="ddp"),
        pytest.param(("--meet",), (0,), id="ddp-rehearsal-fails"),
        pytest.param(("--fsdp",), (0, 2), id="fsdp-two-ranks"),
    ],
)
def test_ranks_move_and_nothing_else_changes(tmp_path: Path, layout: tuple[str, ...], moving: tuple[int, ...]) -> None:
    out = tmp_path / "run-out"
    job = RunningJob(tmp_path / "run", *STEPS, *layout, "--pace", "0.1", "--out", str(out), standby=2)
    until(lambda: len(lines(out, 0)) > 4, "steps")
    ranks = [word for rank in moving for word in ("--rank", str(rank))]
    said = keepstep("move", "--run", tmp_path / "run", *ranks, cwd=tmp_path)
    assert said.returncode == 0 and "is made" in said.stdout, said.stderr
    again = keepstep("move", "--run", tmp_path / "run", "--rank", 9, cwd=tmp_path)
    assert again.returncode == 2 and "no rank 9" in again.stderr
    assert job.finish() == 0, job.text()
    even = run_to_end(tmp_path / "even", *STEPS, *layout, standby=0)
    assert job.report()["weights_sha256"] == even.report()["weights_sha256"] != ""
    assert job.logs() == even.logs()
    assert [len(pids(out, rank)) for rank in range(4)] == [2 if rank in moving else 1 for rank in range(4)]
    assert job.report()["incidents"] == []


@pytest.mark.long
def test_a_rank_moves_to_another_node(tmp_path: Path) -> None:
    script = (SCRIPTS / "toy.py", *STEPS, "--pace", "0.1", "--out", tmp_path)
    words = ("controller", "--nnodes", 2, "--port", 0, "--run", "run", "--token-file", "token", "--standby", 1, *script)
    controller = started(*words, cwd=tmp_path)
    agents: list[subprocess.Popen[str]] = []
    try:
        assert controller.stderr is not None
        found = re.search(r"127\.0\.0\.1:\d+", controller.stderr.readline())
        assert found is not None
        for node in ("a", "b"):
            more = ("agent", "--controller", found.group(), "--node", node, "--run", node, "--token-file", "token")
            agents.append(started(*more, cwd=tmp_path))
        until(lambda: len(lines(tmp_path, 0)) > 4, "steps")
        said = keepstep("move", "--run", "run", "--rank", 0, "--to", "b", cwd=tmp_path)
        assert said.returncode == 0 and "is made" in said.stdout, said.stderr
        for process in (controller, *agents):
            process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0
    finally:
        for process in (controller, *agents):
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=LIMIT_S)
    logs = {rank: [line.rsplit(" ", 1)[0] for line in lines(tmp_path, rank)] for rank in (0, 1)}
    assert logs == run_to_end(tmp_path / "even", *STEPS, world=2, standby=0).logs()
    assert [len(pids(tmp_path, rank)) for rank in (0, 1)] == [2, 1]


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "moving"),
    [
        ("tensor_parallel", (1,)),
        ("pipeline", (1,)),
        ("pipeline", (0, 1)),
        ("interleaved", (1,)),
        ("expert_parallel", (1,)),
    ],
)
def test_ranks_move_in_all_their_groups(tmp_path: Path, layout: str, moving: tuple[int, ...]) -> None:
    """Groups of tensor, pipeline and expert parallelism change together, for state that no other rank has."""
    log, pace, words = tmp_path / "steps", tmp_path / "pace", ["--steps", "80"]
    pace.write_text("0.1")
    options = ["--pace-file", str(pace)]
    job = LayoutJob(
        tmp_path / "run", layout, *words, "--step-log", str(log), options=options, world=2, standby=len(moving)
    )
    try:
        until(lambda: log.exists() and log.read_text().count("\n") > 8, "steps")
        ranks = [word for rank in moving for word in ("--rank", str(rank))]
        said = keepstep("move", "--run", tmp_path / "run", *ranks, cwd=tmp_path)
        assert said.returncode == 0 and "is made" in said.stdout, said.stderr + job.text()[-4000:]
        pace.write_text("0")
        assert job.end() == by_torchrun(tmp_path / "even", layout, *words, world=2), job.text()[-4000:]
        assert job.report()["incidents"] == []
    finally:
        job.process.kill()
