"""Ranks are killed from outside at every point of a step; the job ends with the same bits as an undisturbed one.

Shows G-1 (a step counts for all or for none) and G-2 (bit-identical end) on real processes and signals.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import RunningJob, run_and_kill


def same_end(
    job: RunningJob, undisturbed: RunningJob, losses: int, unlogged: frozenset[tuple[int, int]] = frozenset()
) -> None:
    """The job ended well, with the same weights, losses, samples and random numbers, and reports its incidents.

    `unlogged` are (rank, step) where the rank died after the agreement: the step counts, its log line died with it.
    """
    assert job.finish() == 0, job.text()
    report, expected = job.report(), undisturbed.report()
    assert report["weights_sha256"] == expected["weights_sha256"] != "", job.text()
    logs = job.logs()
    for rank, expected_lines in undisturbed.logs().items():
        wanted = [line for line in expected_lines if (rank, int(line.split()[0])) not in unlogged]
        assert logs[rank] == wanted, f"rank {rank}\n{job.text()}"
    assert len(report["incidents"]) == losses, job.text()
    assert all(incident["first_valid_step"] > 0 for incident in report["incidents"])


@pytest.mark.parametrize(
    "holds",
    [
        ["2:3:collective:0", "1:6:agreed", "0:9:updating"],
        ["3:2:updated", "0:5:forward", "1:8:collective:2"],
    ],
    ids=["collective-agreed-updating", "updated-forward-collective"],
)
def test_killed_one_after_the_other(tmp_path: Path, undisturbed: RunningJob, holds: list[str]) -> None:
    job = run_and_kill(tmp_path / "run", holds, standby=3)
    parts = [hold.split(":") for hold in holds]
    late = ("agreed", "updating", "updated")
    same_end(job, undisturbed, losses=3, unlogged=frozenset((int(p[0]), int(p[1])) for p in parts if p[2] in late))


def test_a_joiner_whose_rehearsal_fails_adds_its_gradients_to_the_right_ones(
    tmp_path: Path, undisturbed: RunningJob
) -> None:
    """G-2: it fails before its first backward pass, behind which DDP forms its gradient buckets."""
    job = run_and_kill(tmp_path / "run", ["1:4:forward"], "--meet")
    same_end(job, undisturbed, losses=1)
    assert "the rehearsal of rank" in job.text()


def test_two_at_once(tmp_path: Path, undisturbed: RunningJob) -> None:
    job = run_and_kill(tmp_path / "run", ["1:4:forward", "2:4:forward"], standby=2)
    same_end(job, undisturbed, losses=2)


def test_no_standby_left(tmp_path: Path, undisturbed: RunningJob) -> None:
    job = run_and_kill(tmp_path / "run", ["1:4:collective:1"], standby=0)
    same_end(job, undisturbed, losses=1)
    assert "fresh process" in job.text()


def test_frozen_rank_wakes_up_fenced(tmp_path: Path, undisturbed: RunningJob) -> None:
    """G-8: a fenced member changes nothing: it wakes up, is told so, and exits."""
    job = run_and_kill(tmp_path / "run", ["2:4:collective:0"], "--pace", "0.3", how=signal.SIGSTOP)
    frozen = int(Path(tmp_path / "run-marker.0").read_text())
    while len(job.logs().get(2, ())) < 7:
        assert job.process.poll() is None, job.text()
        time.sleep(0.01)
    os.kill(frozen, signal.SIGCONT)
    same_end(job, undisturbed, losses=1)
    assert job.report()["incidents"][0]["kind"] == "noncommunication_hang"
    assert not Path(f"/proc/{frozen}").exists()


@pytest.mark.long
@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_at_every_collective(tmp_path: Path, undisturbed: RunningJob, rank: int, nth: int) -> None:
    job = run_and_kill(tmp_path / "run", [f"{rank}:3:collective:{nth}"])
    same_end(job, undisturbed, losses=1)
