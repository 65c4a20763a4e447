"""Scripts of other kinds: several optimizers in one step, and a Gloo script that knows nothing of keepstep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import RunningJob

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("point", ["first", "second"])
def test_two_optimizers(tmp_path: Path, point: str) -> None:
    """G-1 with several optimizers: a loss between their updates, or after both, undoes or keeps them all."""
    even = RunningJob(tmp_path / "even", script="two_optimizers.py", world=2, standby=0)
    assert even.finish() == 0, even.text()
    marker = tmp_path / "marker"
    job = RunningJob(tmp_path / "run", "--marker", str(marker), "--point", point, script="two_optimizers.py", world=2)
    os.kill(int(job.wait_for(marker)), signal.SIGKILL)
    assert job.finish() == 0, job.text()
    assert job.report()["weights_sha256"] == even.report()["weights_sha256"] != ""
    assert len(job.report()["incidents"]) == 1


def pids_at(log: Path, rank: int, step: int) -> list[int]:
    """Processes that began `step` or a later one as `rank`, by the script's step log (time, step, rank, pid)."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(line[3]) for line in lines if len(line) == 4 and int(line[2]) == rank and int(line[1]) >= step]


def test_gloo_script_without_our_lines_restarts_from_its_checkpoint(tmp_path: Path) -> None:
    """Stock torchrun 2.13 does not recover such a job: the new ranks meet the addresses of the dead ones."""
    log, script = tmp_path / "steps", ROOT / "bench" / "jobs" / "gpt_torchrun.py"
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", "2", "--standby", "0"]
    command += ["--max-restarts", "2", "--run", str(tmp_path / "run"), str(script), "--steps", "24"]
    command += ["--checkpoint", str(tmp_path / "checkpoint"), "--step-log", str(log)]
    output = tmp_path / "output"
    with output.open("wb") as file:
        job = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    end = time.monotonic() + 120
    while not (lost := pids_at(log, 1, 14)):
        assert job.poll() is None and time.monotonic() < end, output.read_text()
        time.sleep(0.01)
    os.kill(lost[0], signal.SIGKILL)
    assert job.wait(120) == 0, output.read_text()
    again = [int(line.split()[1]) for line in log.read_text().splitlines() if int(line.split()[3]) not in lost]
    assert max(again) == 23 and len(set(pids_at(log, 1, 14))) == 2
    assert pids_at(log, 1, 10) and "restart 1 of 2" in output.read_text()
