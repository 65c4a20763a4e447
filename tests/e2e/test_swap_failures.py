"""Failures inside the repair of a loss: whoever dies at whichever phase of it, the job ends with the same bits.

Shows G-2, G-8 and G-11 on real processes. Several cases of the generated list (swap_cases.py) run in one job, one
after the other. Besides the same bits, a clean end that leaves a valid checkpoint is allowed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from layout_jobs import LayoutJob, by_torchrun
from swap_cases import LAYOUTS, LOST, Case, every_case, some_cases

from keepstep.training.checkpoint import valid_steps

WORLD = 4
STEPS = 400
LIMIT_S = 240.0
CALM_STEPS = 3


class Stage:
    """One job in which cases are played."""

    def __init__(self, tmp_path: Path, layout: str) -> None:
        self.here = tmp_path
        self.steps = tmp_path / "steps"
        self.control = tmp_path / "control"
        self.pace = tmp_path / "pace"
        self.pace.write_text("0.1")
        arguments = ["--steps", str(STEPS), "--step-log", str(self.steps), "--checkpoints", str(tmp_path / "saved")]
        options = ["--control", str(self.control), "--pace-file", str(self.pace)]
        self.job = LayoutJob(tmp_path / "run", layout, *arguments, options=options, world=WORLD, standby=3)
        self.reached: list[str] = []

    def ended(self) -> bool:
        return self.job.process.poll() is not None

    def until(self, condition, what: str) -> bool:
        """Waits for `condition`; False if the job ends first."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            if self.ended():
                return False
            assert time.monotonic() < end, f"{what}\n{self.job.text()[-6000:]}"
            time.sleep(0.03)
        return True

    def begun(self) -> dict[int, tuple[int, int]]:
        """The newest step and the pid of every rank."""
        lines = self.steps.read_text().split("\n")[:-1] if self.steps.exists() else []
        return {int(rank): (int(step), int(pid)) for _, step, rank, pid in (line.split() for line in lines)}

    def calm(self) -> bool:
        """Waits until all ranks have made some more steps, with a standby warm beside them."""
        first = max((step for step, _ in self.begun().values()), default=0)

        def further() -> bool:
            now = self.begun()
            return len(now) == WORLD and all(step >= first + CALM_STEPS for step, _ in now.values())

        return self.until(further, "the job does not go on") and self.until(lambda: self.spare(), "no standby")

    def members(self) -> dict[str, int]:
        """Pids of all processes that were ever started, by member."""
        return {fact["member"]: fact["pid"] for fact in self.job.records("MemberStarted")}

    def welcomed(self) -> list[str]:
        """Members that came as joiners, in order."""
        return [order["target"] for order in self.job.records("Welcome") if order["joiner"]]

    def spare(self) -> str:
        """A warm standby without a rank, or ""."""
        greeted = [fact for fact in self.job.records("Hello") if fact["rank"] < 0]
        taken = set(self.welcomed())
        warm = [fact["member"] for fact in greeted if fact["member"] not in taken and alive(fact["pid"])]
        return warm[0] if warm else ""

    def pid_of(self, victim: str) -> int:
        """0 where there is nobody."""
        if victim.isdigit():
            return self.begun()[int(victim)][1]
        name = self.spare() if victim == "standby" else next(reversed(self.welcomed()), "")
        return self.members().get(name, 0)

    def play(self, number: int, case: Case) -> bool:
        """One case; False if the job has ended."""
        if not self.calm():
            return False
        wanted = {"case": number, "phase": case.phase, "who": case.holder}
        self.control.write_text(json.dumps(wanted))
        marker = self.here / f"case-{number}"
        before = max(step for step, _ in self.begun().values())
        kill(self.pid_of(str(LOST)))
        over = lambda: min(step for step, _ in self.begun().values()) > before + 1  # noqa: E731
        if not self.until(lambda: written(marker) or over(), str(case)):
            return False
        if written(marker):
            self.reached.append(str(case))
        for pid in [self.pid_of(victim) for victim in case.victims]:
            kill(pid)
        self.control.unlink()
        (self.here / f"case-{number}-go").write_text("go")
        return True


def written(marker: Path) -> bool:
    return marker.exists() and bool(marker.read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    if pid and alive(pid):
        os.kill(pid, signal.SIGKILL)


def outcome(tmp_path: Path, layout: str, cases: list[Case]) -> tuple[str, Stage]:
    """Plays all cases in one job: its weights, or "stopped" after a clean end that leaves a valid checkpoint."""
    stage = Stage(tmp_path, layout)
    try:
        for number, case in enumerate(cases):
            if not stage.play(number, case):
                break
        stage.calm()
        stage.pace.write_text("0")
        code = stage.job.finish(limit_s=900.0)
    finally:
        stage.job.process.terminate()
        stage.job.process.wait(60)
    text = stage.job.text()
    assert "Traceback" not in text, text[-6000:]
    if code:
        steps, _ = valid_steps(tmp_path / "saved", rank=0, world=WORLD)
        assert steps and "keepstep: done, exit code" in text, text[-6000:]
        return "stopped", stage
    return stage.job.end(), stage


def undisturbed(tmp_path: Path, layout: str) -> str:
    return by_torchrun(tmp_path / "even", layout, "--steps", str(STEPS), world=WORLD)


@pytest.mark.long
@pytest.mark.exhaustive
def test_source_and_joiner_die_in_the_swap(tmp_path: Path) -> None:
    """The source dies while it serves, and the joiner when it has fetched: a stop would be no answer to that."""
    cases = [Case("serving", "0", ("0",)), Case("fetched", "joiner", ("joiner",))]
    weights, stage = outcome(tmp_path, "ddp", cases)
    assert weights == undisturbed(tmp_path, "ddp"), stage.job.text()[-6000:]
    assert stage.reached == [str(case) for case in cases]


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_somebody_dies_at_every_phase(tmp_path: Path, layout: str, request: pytest.FixtureRequest) -> None:
    everything = request.config.getoption("--every-case", default=False)
    cases = every_case() if everything else some_cases(13, skip=3 * LAYOUTS.index(layout))
    weights, stage = outcome(tmp_path, layout, cases)
    assert weights in ("stopped", undisturbed(tmp_path, layout)), stage.job.text()[-6000:]
    assert weights == "stopped" or len(stage.reached) >= len(cases) // 2, stage.reached
