"""Faults of the state path on purpose: a source at a tenth of its pace is named, a corrupt checkpoint is named too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from clusters import SCRIPTS
from drill_answers import answer_of, right, verdict_of
from drill_driver import Journal
from jobs import RunningJob
from launching import keepstep

from keepstep.records.drills import DrillRequest


class Watched(RunningJob):
    """`keepstep run` whose journal is read while it runs."""

    def __init__(self, directory: Path, *arguments: object, **options: int) -> None:
        super().__init__(directory, *map(str, arguments), script="wide.py", **options)
        self.journal = Journal(directory / "journal.jsonl")

    def until(self, condition, what: str, *, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            self.journal.read()
            assert time.monotonic() < end, f"never came: {what}\n{self.text()[-3000:]}"
            assert self.process.poll() is None or condition(), f"ended before {what}\n{self.text()[-3000:]}"
            time.sleep(0.02)

    def named(self, request: DrillRequest) -> bool:
        answer = answer_of(request)
        return any(right(verdict_of(record), answer) for record in self.journal.of("Finding"))

    def drill(self, *words: object) -> None:
        done = keepstep("drill", *words, "--run", self.directory, cwd=SCRIPTS)
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
            self.finish()


def begun(job: Watched, step: int) -> bool:
    return any(r["step"] >= step for r in job.journal.of("StepProgress"))


def drilled(job: Watched, fault: str) -> list[dict]:
    return [record for record in job.journal.of("DrillRecord") if record["fault"] == fault]


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_source_that_gives_its_state_slowly_is_named(tmp_path):
    job = Watched(tmp_path / "run", "--megabytes", 96, world=4, standby=1)
    try:
        job.until(lambda: "is warm" in job.text() and begun(job, 2), "a standby and steps")
        job.drill("throttle-state", "--rank", 2, "--rate", 2e6)
        job.until(lambda: drilled(job, "throttle-state"), "the drill")
        job.drill("kill", "--rank", 1)
        job.until(lambda: job.journal.of("Incident"), "the repair")
        assert job.named(DrillRequest("throttle-state", 2, rate=2e6))
    finally:
        job.stop()


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_corrupt_checkpoint_is_named_and_an_older_one_is_taken(tmp_path):
    """G-14"""
    words = ("--megabytes", 1, "--checkpoint", tmp_path / "checkpoints")
    first = Watched(tmp_path / "first", *words, world=2, standby=0)
    try:
        first.until(lambda: begun(first, 12), "two checkpoints")
        first.drill("corrupt-checkpoint", "--rank", 1)
        first.until(lambda: drilled(first, "corrupt-checkpoint"), "the drill")
        os.kill(first.process.pid, signal.SIGKILL)  # so that no newer one is written
        first.process.wait(20)
        (record,) = drilled(first, "corrupt-checkpoint")
        broken = int(record["note"].split("step-")[1].split("/")[0])
    finally:
        first.stop()
    again = Watched(tmp_path / "again", *words, world=2, standby=0)
    try:
        again.until(lambda: again.journal.of("Finding") or begun(again, broken + 1), "the finding")
        if (tmp_path / "checkpoints" / f"step-{broken:08d}").exists():
            assert again.named(DrillRequest("corrupt-checkpoint", 1))
    finally:
        again.stop()
