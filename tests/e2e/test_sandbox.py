"""Standbys rehearse the real step of a real job, nothing of it is left, and the first step after the join is warm.

Shows G-2 for members that have rehearsed: the weights of a run with a loss are those of one without.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from jobs import RunningJob
from test_change import facts, wait_for

pytestmark = pytest.mark.long


class Rehearsed:
    """A job of two ranks that stand in step 4 until its standby has rehearsed and one of them was killed."""

    def __init__(self, folder: Path, layout: str, *arguments: str, kill: int = 1, standby: int = 1) -> None:
        self.job = RunningJob(
            folder / "run",
            "--layout",
            layout,
            "--gate",
            "4",
            "--out",
            str(folder / "run-out"),
            *arguments,
            script="rehearsed.py",
            world=2,
            standby=standby,
            options=("--on-hang", "observe"),
        )
        wait_for(self.job, lambda: len(self.said("MemberStarted")) == 2 + standby, limit_s=60.0)
        if standby:
            wait_for(self.job, lambda: self.said("WarmedUp"), limit_s=240.0)
        self.members = {f["member"]: f for f in facts(self.job) if f["kind"] == "MemberStarted"}
        self.lost = next(f["pid"] for f in self.members.values() if f["rank"] == kill)
        self.warm = next((f["pid"] for f in self.members.values() if f["rank"] < 0), -1)
        if standby:
            self.before = self.files()
            os.kill(self.lost, signal.SIGKILL)
        (self.job.out / "go").write_text("go")
        assert self.job.finish(limit_s=240.0) == 0, self.job.text()

    def said(self, kind: str) -> list[dict]:
        return [fact for fact in facts(self.job) if fact["kind"] == kind]

    def files(self) -> set[str]:
        return {str(path.relative_to(self.job.out)) for path in self.job.out.rglob("*")}

    def losses(self, rank: int) -> dict[int, str]:
        """By step; of one that was done again the last one counts."""
        return {step["step"]: step["loss"] for step in self.steps(rank)}

    def steps(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in (self.job.out / f"rank-{rank}.jsonl").open()]


LAYOUTS = ("ddp", "fsdp", "experts", "pipeline")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_standby_rehearses_every_layout_and_joins(tmp_path: Path, layout: str) -> None:
    """The rehearsal goes to its end, the joiner runs on, and weights and losses are those of an undisturbed run."""
    even = Rehearsed(tmp_path / "even", layout, standby=0)
    lossy = Rehearsed(tmp_path / "lossy", layout)
    (warmed,) = lossy.said("WarmedUp")[:1]
    assert (warmed["why"], len(warmed["names"])) == ("", 2 if layout == "pipeline" else 1)
    for rank in range(2):
        assert lossy.losses(rank) == even.losses(rank)
    assert {s["pid"] for s in lossy.steps(1)} == {lossy.lost, lossy.warm}
    assert lossy.job.report()["weights_sha256"] == even.job.report()["weights_sha256"]


@pytest.mark.exhaustive
def test_compiled_code_is_hot_after_the_join_and_nothing_else_is_left(tmp_path: Path) -> None:
    """No frame is compiled by the joiner after its rehearsal, and none of what a rehearsal touches shows it.

    Weights, optimizer, random numbers and data position: the losses after the join are those of the undisturbed run.
    """
    even = Rehearsed(tmp_path / "even", "compiled", standby=0)
    lossy = Rehearsed(tmp_path / "lossy", "compiled")
    joined = [step for step in lossy.steps(1) if step["pid"] == lossy.warm]
    assert even.steps(1)[0]["compiled"] > 0
    assert joined and [step["compiled"] for step in joined] == [0] * len(joined)
    assert [s["loss"] for s in lossy.steps(1)] == [s["loss"] for s in even.steps(1)]
    assert lossy.job.report()["weights_sha256"] == even.job.report()["weights_sha256"]
    assert not any(str(lossy.warm) in name for name in lossy.before), "a rehearsal writes no files"
    trackers = [path for path in lossy.job.out.rglob("*.jsonl") if path.stem == str(lossy.warm)]
    assert [line["step"] for path in trackers for line in map(json.loads, path.open())] == [4, 5, 6, 7]
    assert "rehearsing True" not in lossy.job.text()
    assert f"step 0 by {lossy.warm}" not in lossy.job.text()
    assert [step["groups"] for step in joined] == [even.steps(1)[0]["groups"]] * len(joined), "names of groups"
    assert {step["made"] for step in joined} == {even.steps(1)[0]["made"]}, "attributes of the script's classes"
    logged = (lossy.job.out / "log-1.txt").read_text().splitlines()
    told, steps = [[line for line in logged if word in line] for word in (":keepstep:", ":root:")]
    assert [line.rsplit(" ", 1)[1] for line in steps] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert len(told) == 1 and "broadcast_object_list at " in told[0] and told[0].count("rehearsed.py:") == 1, told


def test_a_script_that_fails_in_its_rehearsal_is_told_and_the_standby_joins_all_the_same(tmp_path: Path) -> None:
    job = Rehearsed(tmp_path, "ddp", "--fail-in-rehearsal", "--before", str(tmp_path / "before"))
    (warmed,) = job.said("WarmedUp")[:1]
    assert warmed["names"] == [] and "RuntimeError: only in the sandbox" in warmed["why"]
    assert job.steps(1)[-1]["pid"] == job.warm
    runs = (tmp_path / "before").read_text().split()
    assert runs.count(str(job.warm)) == 2, "what stands before join() is run once more, and that is all"


def test_switched_off_nothing_is_recorded(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("sandbox = false\n")
    out = tmp_path / "run-out"
    job = RunningJob(
        tmp_path / "run",
        "--steps",
        "4",
        "--out",
        str(out),
        script="rehearsed.py",
        world=2,
        options=("--settings", str(settings)),
    )
    assert job.finish() == 0, job.text()
    kinds = {fact["kind"] for fact in facts(job)}
    assert not kinds & {"RecordStep", "RoleSeen", "WarmUp"} and not (tmp_path / "run" / "sandbox").exists()
