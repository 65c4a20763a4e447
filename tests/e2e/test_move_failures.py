"""Failures inside a planned move: whoever dies at whichever phase of it, the job ends with the same bits.

Shows G-2, G-11 and G-22 on real processes: leaver, joiner or a stayer stands still at a phase while somebody is killed.
Several cases are played in one job, one after the other.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from layout_jobs import by_torchrun
from test_swap_failures import STEPS, WORLD, Stage, kill, written

LEAVER, STAYER, OTHER = "2", "0", "3"
PHASES = {
    LEAVER: ("leave", "snapshot", "commit", "voted", "proving"),
    "joiner": ("welcome", "ready", "follow", "room", "following", "handed", "taking", "taken"),
    STAYER: ("stay", "staying", "stayed"),
}
VICTIMS = ((LEAVER,), ("joiner",), (STAYER,), (LEAVER, "joiner"), ("joiner", OTHER))


def every_case() -> list[tuple[str, str, tuple[str, ...]]]:
    """Phase, who stands still at it, who is killed meanwhile."""
    phases = [(phase, holder) for holder, some in PHASES.items() for phase in some]
    return [(phase, holder, victims) for victims, (phase, holder) in itertools.product(VICTIMS, phases)]


class MoveStage(Stage):
    """One job in which ranks are moved and somebody dies."""

    def move(self) -> bool:
        """False if no steps are left to move in."""
        words = [sys.executable, "-m", "keepstep.cli", "move", "--run", str(self.job.directory), "--rank", LEAVER]
        done = subprocess.run([*words, "--no-wait"], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or "last step" in done.stderr, done.stderr
        return done.returncode == 0

    def over(self, before: int) -> bool:
        """Whether the move number `before` + 1 has ended in some way."""
        return len(self.job.records("MoveRecord")) > before

    def play_move(self, number: int, phase: str, *, holder: str, victims: tuple[str, ...]) -> bool:
        """One case; False if the job has ended."""
        if not self.calm():
            return False
        marker = self.here / f"case-{number}"
        self.control.write_text(json.dumps({"case": number, "phase": phase, "who": holder}))
        pids = {victim: self.pid_of(victim) for victim in victims if victim != "joiner"}
        ended = len(self.job.records("MoveRecord"))
        if not self.move():
            return False
        if not self.until(lambda: written(marker) or self.over(ended), f"{phase}@{holder}"):
            return False
        if written(marker):
            self.reached.append(f"{phase}@{holder}")
        for victim in victims:
            kill(pids.get(victim) or self.pid_of(victim))
        self.control.unlink()
        (self.here / f"case-{number}-go").write_text("go")
        return self.until(lambda: self.over(ended), f"the end of the move, {phase}@{holder}")


def played_moves(
    tmp_path: Path, layout: str, cases: list[tuple[str, str, tuple[str, ...]]], *, fewest: int
) -> MoveStage:
    """All cases in one job, and its end. At least `fewest` phases must have been caught."""
    stage = MoveStage(tmp_path, layout)
    try:
        for number, (phase, holder, victims) in enumerate(cases):
            if not stage.play_move(number, phase, holder=holder, victims=victims):
                break
        stage.calm()
        stage.pace.write_text("0")
        assert stage.job.finish(limit_s=500.0) == 0, stage.job.text()[-6000:]
    finally:
        stage.job.process.terminate()
        stage.job.process.wait(60)
    assert "Traceback" not in stage.job.text(), stage.job.text()[-6000:]
    expected = by_torchrun(tmp_path / "even", layout, "--steps", str(STEPS), world=WORLD)
    assert stage.job.end() == expected, stage.job.text()[-6000:]
    assert len(stage.reached) >= fewest, stage.reached
    return stage


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_joiner_that_dies_before_the_commit_leaves_training_untouched(tmp_path: Path) -> None:
    cases = [(phase, "joiner", ("joiner",)) for phase in ("ready", "follow", "room")]
    stage = played_moves(tmp_path, "ddp", cases, fewest=2)
    assert [record["outcome"] for record in stage.job.records("MoveRecord")] == ["not made"] * 3
    assert stage.job.report()["incidents"] == []


def test_the_leaver_dies_when_the_vote_has_passed(tmp_path: Path) -> None:
    """G-22: and before that a move that nobody disturbs."""
    assert played_moves(tmp_path, "ddp", [("none", "0", ()), ("voted", LEAVER, (LEAVER,))], fewest=1).reached


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_somebody_dies_at_every_phase_of_a_move(tmp_path: Path, layout: str, request: pytest.FixtureRequest) -> None:
    everything = every_case()
    if not request.config.getoption("--every-case", default=False):
        everything = everything[("ddp", "hsdp").index(layout) :: 11]
    assert played_moves(tmp_path, layout, everything, fewest=len(everything) * 2 // 3).reached
