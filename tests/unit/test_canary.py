"""What a canary is made of, and what keeps a job from being widened after it."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Event, JobSpec
from keepstep.errors import UsageError
from keepstep.fleet.canary_verdict import canary_trouble
from keepstep.fleet.report import FindingReport, IncidentReport, RunReport
from keepstep.records.canary import CanaryLoss, canary_name, canary_steps, name_without_canary
from keepstep.records.finding import QUIET
from keepstep.records.messages import AgentHello
from keepstep.service.canary_run import Canary, CanaryFailed, canary_plan, last_word, not_a_canary, run_canary
from keepstep.service.job_host import JobPlan
from keepstep.service.member_process import bad_loss
from keepstep.service.run_directory import RunDirectory, is_running
from keepstep.service.settings import Settings
from keepstep.service.stop_signals import STOPPED_BY

CLEAN = RunReport("j", "s.py", 2, 0, "all ranks are done", (), 5, 1.0, "ab", 0.0, 1.0)
SETTINGS = Settings(nproc_per_node=4, standby=1, reserve_bytes=0, on_shortage="wait")
PLAN = JobPlan("j", "s.py", (), 2, SETTINGS, ("never-start:0",))


def test_the_name_tells_the_steps():
    assert canary_steps(canary_name("j", 7)) == 7 and name_without_canary(canary_name("j", 7)) == "j"
    for name in ("j", "canary-7", "j-canary-0", "j-canary-x", ""):
        assert canary_steps(name) == 0 and name_without_canary(name) == name
    with pytest.raises(UsageError):
        not_a_canary("j-canary-7")


@pytest.mark.parametrize(("ranks", "nodes", "slots"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (8, 2, 4)])
def test_the_canary_is_small_and_plain(ranks, nodes, slots):
    small = canary_plan(PLAN, Canary(ranks, 5))
    assert (small.nnodes, small.settings.nproc_per_node, small.world) == (nodes, slots, ranks)
    assert (small.settings.standby, small.settings.max_restarts, small.drills) == (0, 0, ())
    assert small.settings.on_shortage == "stop", "it lets no other agent in"
    assert canary_steps(small.job) == 5


@pytest.mark.parametrize("canary", [Canary(9, 5), Canary(5, 5), Canary(-1, 5), Canary(1, 0)])
def test_a_canary_that_does_not_fit(canary):
    with pytest.raises(UsageError):
        canary_plan(PLAN, canary)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (b"step 3 loss nan", "nan"),
        (b"loss: -inf", "-inf"),
        (b"loss=Infinity", "Infinity"),
        (b"loss 0.5", ""),
        (b"the loss information", ""),
        (b"nan loss", ""),
    ],
)
def test_losses_that_are_no_finite_number(line, loss):
    assert bad_loss(line) == loss


def test_a_clean_canary_gives_no_trouble():
    assert canary_trouble(CLEAN, steps=5) == ""
    assert canary_trouble(msgspec.structs.replace(CLEAN, steps_kept=0), steps=5) == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"exit_code": 3, "why": "rank 0 failed"}, "ended with 3: rank 0 failed"),
        ({"findings": (FindingReport("compute_slow", (1,), 2, ()),)}, "1 findings, the first compute_slow, rank 1"),
        ({"incidents": (IncidentReport("crash", 0, "n", 0.0, *[None] * 11, 0, 0, 1, ""),)}, "1 ranks were lost"),
        ({"steps_kept": 3, "why": "stopped"}, "3 of 5 steps: stopped"),
    ],
)
def test_what_keeps_a_job_from_being_widened(fields, says):
    assert says in canary_trouble(msgspec.structs.replace(CLEAN, **fields), steps=5)
    assert last_word(CLEAN, "j-canary-5") == (0, CLEAN.why)
    code, why = last_word(msgspec.structs.replace(CLEAN, **fields), "j-canary-5")
    assert code == fields.get("exit_code", 1) and says in why, "agents would wait for the job"


@pytest.mark.parametrize("kind", sorted(QUIET))
def test_findings_that_are_no_alarm_keep_nothing(kind):
    found = msgspec.structs.replace(CLEAN, findings=(FindingReport(kind, (1,), 2, ()),))
    assert canary_trouble(found, steps=5) == ""


def test_a_loss_that_is_no_finite_number_ends_the_canary():
    spec = JobSpec(job="j-canary-5", world=1, nnodes=1, keepstep_version="1", secret=b"s", max_restarts=0)
    state = new_job(spec, 1)
    for fact in (AgentHello("n1", 1, 0, "1"), CanaryLoss("m0", 0, "nan", "m0.log")):
        state = decide(state, Event("n1", "", fact), now=1.0).state
    assert (state.phase, state.exit_code, state.exit_why) == ("ending", 1, "the loss is nan in m0.log on n1")


def test_its_report_is_read(tmp_path: Path):
    told = []
    bad = msgspec.structs.replace(CLEAN, exit_code=1, why="the loss is nan in m0.log on n1")

    def lead(small: JobPlan, folder: Path) -> int:
        told.append((small.world, folder))
        folder.mkdir(parents=True)
        report = bad if folder.parent.name == "bad" else CLEAN
        (folder / "report.json").write_bytes(msgspec.json.encode(report))
        return report.exit_code

    run_canary(PLAN, Canary(2, 5), path=tmp_path / "good", lead=lead).close()
    with pytest.raises(CanaryFailed, match=r"the loss is nan in m0\.log"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "bad", lead=lead)
    assert told == [(2, tmp_path / "good" / "canary"), (2, tmp_path / "bad" / "canary")]
    with pytest.raises(CanaryFailed, match="ended with 1"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "silent", lead=lambda small, folder: 1)


@pytest.mark.parametrize("number", STOPPED_BY)
def test_a_canary_that_is_told_to_stop_ends_as_a_job_does(tmp_path: Path, number: signal.Signals):
    report = msgspec.structs.replace(CLEAN, exit_code=128 + number, why=f"stopped by {number.name}")

    def lead(small: JobPlan, folder: Path) -> int:
        folder.mkdir(parents=True)
        (folder / "report.json").write_bytes(msgspec.json.encode(report))
        return 128 + number

    with pytest.raises(CanaryFailed, match=f"was stopped by {number.name}") as caught:
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "run", lead=lead)
    assert caught.value.exit_code == 128 + number


def test_the_directory_must_be_free_for_the_job_itself(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path, lead=lambda small, folder: 0)
    assert not (tmp_path / "canary").exists() and (tmp_path / "thesis.txt").read_text() == "years"


def test_no_other_run_begins_in_the_directory_while_the_canary_runs_and_before_the_job_begins(tmp_path: Path):
    path = tmp_path / "run"

    def lead(small: JobPlan, folder: Path) -> int:
        with pytest.raises(UsageError, match="another run is going on"):
            RunDirectory(path, reserve_bytes=0)
        folder.mkdir()
        (folder / "report.json").write_bytes(msgspec.json.encode(CLEAN))
        return 0

    directory = run_canary(PLAN, Canary(2, 5), path=path, lead=lead)
    assert is_running(path)
    directory.close()
    with pytest.raises(CanaryFailed):
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "failed", lead=lambda small, folder: 1)
    assert not (tmp_path / "failed").exists(), "it is let go"
