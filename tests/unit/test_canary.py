"""What a canary is made of, and what keeps a job from being widened after it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from keepstep.errors import UsageError
from keepstep.fleet.canary_verdict import bad_loss, canary_trouble
from keepstep.fleet.report import FindingReport, IncidentReport, RunReport
from keepstep.records.canary import canary_name, canary_steps, name_without_canary
from keepstep.service.canary_run import Canary, CanaryFailed, canary_plan, not_a_canary, run_canary
from keepstep.service.job_host import JobPlan
from keepstep.service.settings import Settings

CLEAN = RunReport("j", "s.py", 2, 0, "all ranks are done", (), 5, 1.0, "ab", 0.0, 1.0)
PLAN = JobPlan("j", "s.py", (), 2, Settings(nproc_per_node=4, standby=1, reserve_bytes=0), ("never-start:0",))


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
    assert canary_steps(small.job) == 5


@pytest.mark.parametrize("canary", [Canary(9, 5), Canary(5, 5), Canary(-1, 5), Canary(1, 0)])
def test_a_canary_that_does_not_fit(canary):
    with pytest.raises(UsageError):
        canary_plan(PLAN, canary)


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("step 3 loss nan", "nan"),
        ("loss: -inf", "-inf"),
        ("loss=Infinity", "Infinity"),
        ("loss 0.5", ""),
        ("the loss information", ""),
        ("nan loss", ""),
    ],
)
def test_losses_that_are_no_finite_number(line, loss):
    assert bad_loss(line) == loss


def test_a_clean_canary_gives_no_trouble():
    assert canary_trouble(CLEAN, steps=5, losses={}) == ""
    assert canary_trouble(msgspec.structs.replace(CLEAN, steps_kept=0), steps=5, losses={}) == ""


@pytest.mark.parametrize(
    ("fields", "losses", "says"),
    [
        ({"exit_code": 3, "why": "rank 0 failed"}, {}, "ended with 3: rank 0 failed"),
        ({}, {"m0.log:4": "nan"}, "the loss is nan in m0.log:4"),
        ({"findings": (FindingReport("compute_slow", (1,), 2, ()),)}, {}, "1 findings, the first compute_slow, rank 1"),
        ({"incidents": (IncidentReport("crash", 0, "n", 0.0, *[None] * 11, 0, 0, 1, ""),)}, {}, "1 ranks were lost"),
        ({"steps_kept": 3, "why": "stopped"}, {}, "3 of 5 steps: stopped"),
    ],
)
def test_what_keeps_a_job_from_being_widened(fields, losses, says):
    assert says in canary_trouble(msgspec.structs.replace(CLEAN, **fields), steps=5, losses=losses)


def test_its_report_and_its_logs_are_read(tmp_path: Path):
    told = []

    def lead(small: JobPlan, folder: Path) -> int:
        told.append((small.world, folder))
        (folder / "logs").mkdir(parents=True)
        (folder / "report.json").write_bytes(msgspec.json.encode(CLEAN))
        (folder / "logs" / "m0.log").write_text("step 1 loss 0.5\n" + "step 2 loss nan\n" * (len(told) - 1))
        return 0

    run_canary(PLAN, Canary(2, 5), path=tmp_path / "good", lead=lead)
    with pytest.raises(CanaryFailed, match="the loss is nan in m0.log:2"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "bad", lead=lead)
    assert told == [(2, tmp_path / "good" / "canary"), (2, tmp_path / "bad" / "canary")]
    with pytest.raises(CanaryFailed, match="ended with 1"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path / "silent", lead=lambda small, folder: 1)


def test_the_directory_must_be_free_for_the_job_itself(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        run_canary(PLAN, Canary(2, 5), path=tmp_path, lead=lambda small, folder: 0)
    assert not (tmp_path / "canary").exists() and (tmp_path / "thesis.txt").read_text() == "years"
