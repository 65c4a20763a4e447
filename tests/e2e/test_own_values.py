"""Values that each rank has for itself in `job.track(extra=...)`, in real jobs: as in one that was not disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import RunningJob

SCRIPT = "own_values.py"


def ended(job: RunningJob) -> list[str]:
    """The weights, and what each rank ends with."""
    assert job.finish() == 0, job.text()
    said = sorted(line for line in job.text().splitlines() if " ends with " in line)
    return [job.report()["weights_sha256"], *said]


@pytest.mark.parametrize(
    ("world", "point", "at", "checkpoint"),
    [
        pytest.param(2, "inside", 7, False, id="one-source", marks=pytest.mark.long),
        pytest.param(2, "behind", 7, False, id="behind-the-update"),
        pytest.param(3, "inside", 0, False, id="two-sources-in-the-first-step", marks=pytest.mark.long),
        pytest.param(3, "inside", 7, True, id="two-sources-and-a-checkpoint", marks=pytest.mark.long),
    ],
)
def test_a_joiner_goes_on_with_those_of_the_lost_rank(
    tmp_path: Path, world: int, point: str, at: int, checkpoint: bool
) -> None:
    """G-2, G-13: the replicas are one state, whatever they have beside it."""
    even = RunningJob(tmp_path / "even", script=SCRIPT, world=world, standby=0)
    expected = ended(even)
    marker = tmp_path / "marker"
    words = ["--marker", str(marker), "--point", point, "--at", str(at)]
    words += ["--checkpoint", str(tmp_path / "checkpoint")] if checkpoint else []
    job = RunningJob(tmp_path / "run", *words, script=SCRIPT, world=world)
    os.kill(int(job.wait_for(marker)), signal.SIGKILL)
    assert ended(job) == expected
    (incident,) = job.report()["incidents"]
    assert incident["source"] == "replica" and incident["steps_recomputed"] <= 1
    assert "state_divergence" not in job.text()


@pytest.mark.parametrize("point", ["inside", pytest.param("behind", marks=pytest.mark.long)])
def test_buffers_that_nobody_makes_alike_are_each_ranks_own(tmp_path: Path, point: str) -> None:
    """G-2, G-13: replicas whose running values all differ are one state, and a joiner goes on with the lost rank's."""
    even = RunningJob(tmp_path / "even", "--norm", script=SCRIPT, world=4, standby=0)
    expected = ended(even)
    marker = tmp_path / "marker"
    job = RunningJob(tmp_path / "run", "--norm", "--marker", str(marker), "--point", point, script=SCRIPT, world=4)
    os.kill(int(job.wait_for(marker)), signal.SIGKILL)
    assert ended(job) == expected
    (incident,) = job.report()["incidents"]
    assert incident["source"] == "replica" and "state_divergence" not in job.text()
    assert job.text().count("nobody makes such buffers alike: each rank keeps its own") == 1


def test_a_second_start_goes_on_with_those_of_each_rank(tmp_path: Path) -> None:
    """G-2 over a checkpoint whose shared state one rank wrote for all."""
    expected = ended(RunningJob(tmp_path / "even", script=SCRIPT, world=2, standby=0))
    place = ("--checkpoint", str(tmp_path / "checkpoint"))
    ended(RunningJob(tmp_path / "first", *place, "--steps", "7", script=SCRIPT, world=2, standby=0))
    assert ended(RunningJob(tmp_path / "second", *place, script=SCRIPT, world=2, standby=0)) == expected


def test_too_large_and_different_is_refused_at_once(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", "--large", "20000", script=SCRIPT, world=2, standby=0)
    assert job.finish() != 0
    assert "(extra.large) has other values on rank 1 than on rank 0" in job.text()
