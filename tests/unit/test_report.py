"""The report: journal records in, numbers and a time line out."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.fleet.report import RunReport, report_text, summarise
from keepstep.records.events import DrillRecord, Finding, Incident, JobEnded, JobStarted, StepProgress, Suspect

STARTED = JobStarted(job="j", script="train.py", world=4, wall=100.0)
ENDED = JobEnded(job="j", wall=160.0, exit_code=0, why="all ranks are done", steps_kept=60, weights_sha256="ab" * 32)
LOSS = Incident(
    kind="crash",
    rank=2,
    node="n1",
    onset_wall=130.0,
    detected=0.010,
    decided=0.011,
    fenced=0.011,
    standby_chosen=0.012,
    warmed=0.1,
    copied=0.15,
    joined=0.16,
    first_valid_step=0.2,
    steps_recomputed=0,
    bytes_moved=1000,
    members_changed=1,
)


def drill(rank: int, wall: float, fault: str = "kill") -> DrillRecord:
    return DrillRecord(fault=fault, rank=rank, step=30, wall=wall)


def test_a_whole_run():
    report = summarise([STARTED, drill(2, 129.99), LOSS, ENDED])
    assert (report.job, report.world, report.exit_code, report.duration_s) == ("j", 4, 0, 60.0)
    assert (report.steps_kept, report.kept_step_share, report.weights_sha256) == (60, 1.0, "ab" * 32)
    (incident,) = report.incidents
    assert (incident.kind, incident.rank, incident.node, incident.members_changed) == ("crash", 2, "n1", 1)
    assert incident.first_valid_step == 0.2 and incident.connected is None
    assert incident.injected == pytest.approx(-0.01)


def test_steps_done_again_lower_the_share():
    again = msgspec.structs.replace(LOSS, steps_recomputed=15)
    assert summarise([STARTED, again, ENDED]).kept_step_share == 60 / 75


def test_an_alarm_without_a_loss_was_false():
    alarm = msgspec.structs.replace(LOSS, rank=None, members_changed=0, first_valid_step=0.5)
    assert summarise([STARTED, alarm, LOSS, ENDED]).false_alarm_s == 0.5


def test_an_incident_of_no_rank_says_so():
    broken = msgspec.structs.replace(LOSS, kind="communication_hang", rank=None, node="", members_changed=0)
    text = report_text(summarise([STARTED, broken, ENDED]))
    assert "incident 1: communication_hang, no rank\n" in text and "None" not in text


@pytest.mark.parametrize(
    "other", [drill(1, 129.99), drill(2, 50.0), drill(2, 140.0), drill(2, 129.99, fault="corrupt-checkpoint")]
)
def test_a_drill_of_another_rank_or_time_or_that_costs_nobody_explains_nothing(other):
    assert summarise([STARTED, other, LOSS, ENDED]).incidents[0].injected is None


def test_one_drill_explains_one_incident():
    report = summarise([STARTED, drill(2, 129.99), LOSS, LOSS, ENDED])
    assert [incident.injected is None for incident in report.incidents] == [False, True]


def test_a_run_that_was_cut_off():
    report = summarise([STARTED, LOSS])
    assert report.exit_code is None and "cut off" in report.why and report.kept_step_share is None


def test_a_run_that_goes_on_is_not_cut_off():
    report = summarise([STARTED, StepProgress(step=7), StepProgress(step=8)], running=True)
    assert report.exit_code is None and report.steps_kept == 8
    assert "still running" in report_text(report) and "cut off" not in report_text(report)


def test_findings_are_in_the_report_and_its_text():
    found = Finding(
        kind="state_divergence", rank=3, step=9, suspects=((Suspect(rank=3),),), evidence=("digest x differs",)
    )
    report = summarise([STARTED, found, ENDED])
    (finding,) = report.findings
    assert (finding.kind, finding.ranks, finding.step) == ("state_divergence", (3,), 9)
    assert finding.evidence == ("digest x differs",)
    assert "finding: state_divergence, rank 3, step 9: digest x differs" in report_text(report)


def test_the_last_word_on_a_numbered_finding_counts():
    first = Finding(kind="communication_slow", number=1, suspects=((Suspect(link=(1, 2)), Suspect(rank=2)),))
    wider = msgspec.structs.replace(first, status="updated", confidence=0.8, layer="hardware_link", bundle="findings/1")
    other = Finding(kind="compute_slow", number=2, suspects=((Suspect(rank=0),),), next_probe="measure its processor")
    over = msgspec.structs.replace(other, status="ended")
    report = summarise([STARTED, first, other, wider, over, ENDED])
    assert [(f.number, f.ended, f.suspects) for f in report.findings] == [
        (1, False, (("link 1->2", "rank 2"),)),
        (2, True, (("rank 0",),)),
    ]
    text = report_text(report)
    assert "finding 1: communication_slow, link 1->2 or rank 2, hardware_link (80% sure)" in text
    assert "  evidence: findings/1" in text
    assert "finding 2: compute_slow, rank 0, ended" in text and "measure its processor" not in text


def test_nothing_at_all():
    assert summarise([]) == RunReport("", "", 0, None, summarise([]).why, (), 0, None, "", 0.0, None)


def test_the_time_line_has_every_phase_in_order():
    text = report_text(summarise([STARTED, drill(2, 129.99), LOSS, ENDED]))
    rows = [line.split() for line in text.splitlines() if line.startswith("  ") and len(line.split()) == 3]
    assert [row[0] for row in rows[1:]] == [
        "injected",
        "onset",
        "detected",
        "decided",
        "fenced",
        "standby_chosen",
        "warmed",
        "copied",
        "joined",
        "first_valid_step",
    ]
    assert rows[-1][1:] == ["200.0", "40.0"]
    assert "60" in text and "ab" * 32 in text


def test_json_has_the_stated_fields():
    found = msgspec.json.decode(msgspec.json.encode(summarise([STARTED, LOSS, ENDED])))
    assert {"incidents", "steps_kept", "kept_step_share", "weights_sha256", "false_alarm_s"} <= set(found)
    assert {"kind", "rank", "node", "onset", "injected", "steps_recomputed", "bytes_moved"} <= set(
        found["incidents"][0]
    )
