"""Baselines: kept in a run directory, found by the next run of the same script, compared only in one environment."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keepstep.diagnosis.baseline import Baseline
from keepstep.diagnosis.earlier_run import not_compared
from keepstep.records.summary import Fingerprint
from keepstep.service.baselines import KeptBaseline, earlier_baseline, keep_baseline
from keepstep.service.run_directory import RunDirectory, RunFacts

HERE = Fingerprint(world=4, hardware=("x86_64",), versions=(("torch", "2.13.0"),))
BEFORE = Baseline(fingerprint=HERE, steps=500, duration_us=100_000.0, data_us=1_000.0, own_us=(60_000.0,))


def test_another_environment_is_said_and_the_same_one_is_not() -> None:
    assert not_compared(BEFORE, HERE, run="a") is None
    finding = not_compared(BEFORE, msgspec.structs.replace(HERE, world=8), run="a")
    assert finding is not None and finding.kind == "healthy" and finding.suspects == ()
    assert "run a is not used" in finding.evidence[0] and "world" in finding.evidence[0]


def left(root: Path, job: str, *, script: str, age_s: float, data: bytes) -> None:
    run = RunDirectory(root / job, reserve_bytes=0)
    run.publish(RunFacts(job, script, (), 1, 0, 1, "v", "v", "v", 1.0, 1, ""))
    run.close()
    keep_baseline(run.path, KeptBaseline(job, data))
    os.utime(run.path, (1e9 - age_s, 1e9 - age_s))


def test_the_newest_run_of_the_same_script_is_found(tmp_path: Path) -> None:
    left(tmp_path, "old", script="a.py", age_s=50, data=b"old")
    left(tmp_path, "new", script="a.py", age_s=10, data=b"new")
    left(tmp_path, "empty", script="a.py", age_s=5, data=b"")
    left(tmp_path, "other", script="b.py", age_s=1, data=b"other")
    found = earlier_baseline(tmp_path / "mine", script="a.py", arguments=())
    assert found == KeptBaseline("new", b"new")
    assert earlier_baseline(tmp_path / "mine", script="a.py", arguments=("--more",)) == KeptBaseline()
    assert earlier_baseline(tmp_path / "no" / "mine", script="a.py", arguments=()) == KeptBaseline()


def test_a_damaged_baseline_is_passed_over(tmp_path: Path) -> None:
    left(tmp_path, "run", script="a.py", age_s=1, data=b"x")
    (tmp_path / "run" / "baseline.json").write_bytes(b"{")
    assert earlier_baseline(tmp_path / "mine", script="a.py", arguments=()) == KeptBaseline()
