"""What an operator of a cluster meets: odd exports, files that are not taken, progress, findings told twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet_data import asked, fleet_of, read_text, rows_of, written

from keepstep.cli import main
from keepstep.intake.sacct_values import gpus_of
from keepstep.records.events import Finding, JobStarted
from keepstep.records.journal_line import encode_line
from keepstep.service.fleet_query import incident_answer, incident_list
from keepstep.service.fleet_report import ReportOptions, printed_report, report_json, report_of_fleet
from keepstep.store.fleet_tables import FleetStore

JOB = "JobID|State|Start|End|AllocTRES\n1|COMPLETED|2026-03-01T00:00:00|2026-03-01T01:00:00|gres/gpu=8,node=1\n"


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [("cpu=8,gres/gpu=8K,mem=1G", 8192), ("gres/gpu=8,gres/gpu:h100=8", 8), ("gres/gpu:a100=1K", 1024)],
)
def test_a_thousand_gpus_are_not_one(tres, gpus):
    assert gpus_of(tres) == gpus


def test_times_may_have_a_space_between_day_and_hour():
    """SLURM_TIME_FORMAT="%F %T" writes so."""
    taken = read_text(JOB.replace("T0", " 0"), zone="Europe/Berlin")
    assert [one.reason for one in taken.aside] == []
    assert [str(row[0]) for row in rows_of(taken.attempts, "start")] == ["2026-02-28 23:00:00"]


def test_files_that_were_not_taken_are_in_the_report_until_they_are(tmp_path):
    fleet, bad = tmp_path / "fleet", written(tmp_path, "nodes.txt", "hello\n")
    assert main(["fleet", "import", str(written(tmp_path, "a.txt", JOB)), "--into", str(fleet)]) == 0
    assert main(["fleet", "import", str(bad), "--into", str(fleet)]) == 65
    section = json.loads(report_json(report_of_fleet(fleet, ReportOptions())))["sections"]["sources"]
    assert [row["path"] for row in section["sheets"]["not_taken"]["rows"]] == [str(bad)]
    assert "not written by a tool" in section["sheets"]["not_taken"]["rows"][0]["reason"]
    assert section["words"][-1].startswith("1 files")
    assert "nodes.txt" in printed_report(fleet, ReportOptions(), style="html")
    bad.write_text(JOB.replace("\n1|", "\n2|"))
    assert main(["fleet", "import", str(bad), "--into", str(fleet)]) == 0
    section = json.loads(report_json(report_of_fleet(fleet, ReportOptions())))["sections"]["sources"]
    assert section["sheets"]["not_taken"]["rows"] == []


def test_a_report_says_on_stderr_how_far_it_is(tmp_path, capsys):
    fleet_of(tmp_path / "fleet", written(tmp_path, "a.txt", JOB))
    assert main(["fleet", "report", str(tmp_path / "fleet"), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["title"] == "Fleet report"
    assert said.err.splitlines()[:2] == ["part 1 of 1", "done: Where the time went"]
    assert said.err.splitlines()[-1] == "done: What this rests on"


def test_labels_that_no_source_tells_are_named(tmp_path):
    fleet_of(tmp_path / "fleet", written(tmp_path, "a.txt", JOB))
    words = report_of_fleet(tmp_path / "fleet", ReportOptions()).sections[0].words
    assert any("no source here tells data_loading, compilation, validation apart" in line for line in words)
    log = [{"time": 1772323200 + at, "job": "1", "what": what} for at, what in ((60, "data_start"), (90, "data_end"))]
    told = written(tmp_path, "log.jsonl", "\n".join(json.dumps({"step": at} | one) for at, one in enumerate(log)))
    fleet_of(tmp_path / "fleet", told)
    words = report_of_fleet(tmp_path / "fleet", ReportOptions()).sections[0].words
    assert any("no source here tells compilation, validation apart" in line for line in words)


def test_a_finding_that_is_told_again_is_one_incident(tmp_path):
    """A journal has a line when a finding is new, when more is known, and when it has ended."""
    job = {"job": "run-8"}
    told = [
        Finding(**job, wall=1_790_000_000.0 + at, kind="compute_slow", number=number, status=status, layer=layer)
        for at, number, status, layer in (
            (1, 1, "new", "undetermined"),
            (2, 1, "updated", "host_cpu"),
            (3, 1, "ended", "host_cpu"),
            (9, 2, "new", "undetermined"),
        )
    ]
    records = [JobStarted(**job, wall=1_790_000_000.0, script="t.py", world=2), *told]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(b"".join(encode_line(one) for one in records))
    store = fleet_of(tmp_path / "fleet", folder)
    query = "SELECT layer, epoch_us(onset) - 1790000000000000 FROM incidents ORDER BY onset"
    assert asked(store, query) == [("host_cpu", 1_000_000), ("undetermined", 9_000_000)]
    for row in incident_list(tmp_path / "fleet").rows:
        if row[1] == "compute_slow":
            assert incident_answer(tmp_path / "fleet", row[0]).kind == "compute_slow"


def test_what_is_not_known_is_a_dash(tmp_path):
    head = "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User"
    event = "c|n1|2026-03-01T00:00:00|2026-03-01T01:00:00|DOWN|Not responding|root"
    fleet_of(tmp_path / "fleet", written(tmp_path, "events.txt", f"{head}\n{event}\n"))
    assert " nan" not in printed_report(tmp_path / "fleet", ReportOptions())


def test_a_file_that_gives_nothing_says_so(tmp_path, capsys):
    """The configuration of NHC looks like its log, and has no result in it."""
    conf = written(tmp_path, "nhc.conf", "# NHC Configuration File\n* || check_fs_mount_rw -f /\n")
    assert main(["fleet", "import", str(conf), "--into", str(tmp_path / "fleet")]) == 0
    assert "nothing in it could be used" in capsys.readouterr().out


def test_a_clock_that_jumped_is_noted_in_json_as_in_text():
    """Submitted and started at 00:00, ended at 05:00 by the clock, one hour by the count of the scheduler."""
    time = {"start": 1772323200, "end": 1772341200, "elapsed": 3600, "submission": 1772323200}
    late = {"start": 1772323200, "end": 1772326800, "elapsed": 3600, "submission": 1772323300}
    jobs = [{"job_id": 5 + at, "state": {"current": ["COMPLETED"]}, "time": one} for at, one in enumerate((time, late))]
    taken = read_text(json.dumps({"jobs": jobs}))
    assert taken.attempts["time_note"].to_pylist() == [
        "end - start is 18000 s, the scheduler counted 3600 s",
        "submitted after the start",
    ]


def test_a_node_with_and_without_a_name_of_its_cluster_is_one_node(tmp_path: Path) -> None:
    events = tmp_path / "events.txt"
    events.write_text(
        "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User|\n"
        "lab|n1|2026-01-01T00:00:00|2026-01-01T02:00:00|DOWN|disk|root|\n"
    )
    nodes = tmp_path / "nodes.txt"
    nodes.write_text("NodeName=n1 Arch=x86_64 CPUTot=8\n   State=IDLE Gres=gpu:8\n   BootTime=2025-12-01T00:00:00\n\n")
    into = tmp_path / "fleet"
    assert main(["fleet", "import", str(events), str(nodes), "--into", str(into)]) == 0
    with FleetStore(into).connection() as connection:
        both = "SELECT cluster, node FROM node_intervals UNION ALL SELECT cluster, node FROM inventory"
        assert connection.execute(f"SELECT DISTINCT cluster, node FROM ({both})").fetchall() == [("lab", "n1")]
        assert connection.execute("SELECT count(*) FROM inventory").fetchall() == [(1,)]
