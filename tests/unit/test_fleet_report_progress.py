"""The report where training logs are known: a ledger of steps, checkpoint ages, kept tokens of two periods."""

from __future__ import annotations

import json

import pytest
from fleet_story import COLUMNS, DAY, line, when

from keepstep.service.fleet_import import Reading, import_sources
from keepstep.service.fleet_report import ReportOptions, report_json, report_of_fleet

HOUR = 3600


def imported(folder, jobs, samples, *, modes=()):
    (folder / "sacct.txt").write_text("\n".join([COLUMNS, *jobs]) + "\n")
    header = "scheduler_job,job,time,what,step,step_us,tokens,members,standbys"
    (folder / "progress.csv").write_text("\n".join([header, *samples]) + "\n")
    (folder / "policy_modes.csv").write_text("\n".join(["mode,start,end", *modes]) + "\n")
    import_sources([folder], folder / "fleet", reading=Reading(), say=lambda line: None)
    body = json.loads(report_json(report_of_fleet(folder / "fleet", ReportOptions())))
    return body["sections"]


def sample(number, second, what="step", **given):
    values = {"step": "", "step_us": "", "tokens": "", "members": "", "standbys": ""} | given
    return ",".join(map(str, (number, f"train-{number}", f"{when(second)}Z", what, *values.values())))


def job(number, start, end, state="COMPLETED", nodes=1):
    return line(number, state, nodes=nodes, first=number % 100, times=(start, start, end))


def test_steps_of_a_training_log_are_the_ledger(tmp_path):
    samples = [sample(100, 600, step=0, members=7, standbys=1), sample(100, 2 * HOUR, step=66, members=7, standbys=1)]
    found = imported(tmp_path, [job(100, 0, 2 * HOUR), job(200, 0, HOUR)], samples)
    hours = {row["label"]: row["gpu_hours"] for row in found["ledger"]["sheets"]["ledger"]["rows"]}
    assert hours["standby"] == pytest.approx(2.0)
    assert hours["start_up"] == pytest.approx(7 * 600 / HOUR + 8 / 12)
    assert hours["kept_step"] == pytest.approx(7 * 6600 / HOUR + 8 * 55 / 60)
    assert "66.67% of the GPU-hours" in " ".join(found["ledger"]["words"])


def test_the_age_of_the_checkpoint_is_the_loss(tmp_path):
    samples = [sample(100, HOUR, step=10), sample(100, 2 * HOUR - 360, "checkpoint", step=20)]
    found = imported(tmp_path, [job(100, 0, 2 * HOUR, "NODE_FAIL")], samples)
    hours = {row["label"]: row["gpu_hours"] for row in found["ledger"]["sheets"]["ledger"]["rows"]}
    assert hours["recomputation"] == pytest.approx(8 * 360 / HOUR)
    assert "the true age of the checkpoint for 1 attempts" in " ".join(found["second_order"]["words"])


def test_kept_tokens_of_two_periods_are_compared_on_matched_jobs(tmp_path):
    """Jobs of the second period train a tenth more tokens in the same time."""
    jobs, samples = [], []
    for at in range(60):
        number, start = (at + 1) * 100, at * 12 * HOUR
        length, gain = HOUR * (4 + at % 5), 1.1 if at >= 30 else 1.0
        jobs.append(job(number, start, start + length, nodes=1 + at % 2))
        rate = (1000 + at % 7) * (1 + at % 2)
        for step in range(5):
            spent = 600 + step * (length - 600) / 4
            samples.append(sample(number, start + spent, step=step * 10, tokens=int(rate * gain * step * length / 4)))
    half = when(15 * DAY)
    modes = [f"off,{when(0)}Z,{half}Z", f"automatic,{half}Z,"]
    rows = imported(tmp_path, jobs, samples, modes=modes)["periods"]["sheets"]["periods"]["rows"]
    tokens = next(row for row in rows if row["quantity"].startswith("kept tokens"))
    assert (tokens["before_mode"], tokens["after_mode"], tokens["verdict"]) == ("off", "automatic", "better")
    assert tokens["difference"] / tokens["before"] == pytest.approx(0.1, abs=0.01)
    kept = next(row for row in rows if row["quantity"].startswith("kept GPU-hours"))
    assert kept["verdict"] == "cannot tell"
