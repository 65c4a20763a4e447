"""Starting real jobs from tests: a subprocess of the launcher, its report, and faults from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


class RunningJob:
    """`keepstep run` as a child process with everything it prints kept."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        script: str = "toy.py",
        world: int = 4,
        standby: int = 1,
        options: tuple[str, ...] = (),
    ):
        self.directory = directory
        self.out = directory.parent / f"{directory.name}-out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.output = self.out / "console.txt"
        command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(world)]
        command += ["--standby", str(standby), *options, "--run", str(directory), str(SCRIPTS / script), *arguments]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, path: Path, *, limit_s: float = 90.0) -> str:
        """Wait until `path` has text in it."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if path.exists() and path.read_text():
                return path.read_text()
            assert self.process.poll() is None, self.text()
            time.sleep(0.002)
        raise AssertionError(f"{path} did not come\n{self.text()}")

    def finish(self, *, limit_s: float = 120.0) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(20)
            raise AssertionError(f"the job did not end\n{self.text()}") from None

    def report(self) -> dict:
        return json.loads((self.directory / "report.json").read_text())

    def logs(self) -> dict[int, list[str]]:
        """What each rank logged of kept steps, without pids."""
        return {
            int(path.stem.split("-")[1]): [line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()]
            for path in sorted(self.out.glob("rank-*.log"))
        }


def run_to_end(directory: Path, *arguments: str, **options) -> RunningJob:
    """A job without faults."""
    job = RunningJob(directory, *arguments, "--out", str(directory.parent / f"{directory.name}-out"), **options)
    assert job.finish() == 0, job.text()
    return job


def run_and_kill(directory: Path, holds: list[str], *arguments: str, how=signal.SIGKILL, **options) -> RunningJob:
    """A job whose ranks stop at `holds`; each is hit by `how` as soon as it stands there."""
    marker = directory.parent / f"{directory.name}-marker"
    more = [word for hold in holds for word in ("--hold", hold)]
    job = RunningJob(
        directory,
        *more,
        "--marker",
        str(marker),
        "--out",
        str(directory.parent / f"{directory.name}-out"),
        *arguments,
        **options,
    )
    for i in range(len(holds)):
        os.kill(int(job.wait_for(Path(f"{marker}.{i}"))), how)
    return job
