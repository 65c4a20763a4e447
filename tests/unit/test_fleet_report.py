"""The fleet report end to end: planted truth, real traces, three forms, any number of parts, and mistakes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from fault_list import rows as fault_rows
from fleet_story import DAY, when, write_story

from keepstep.cli.entry import main
from keepstep.errors import UsageError
from keepstep.service.fleet_import import Reading, import_sources
from keepstep.service.fleet_report import ReportOptions, printed_report, report_json, report_of_fleet
from keepstep.service.fleet_report_html import report_html
from keepstep.service.fleet_report_text import report_text

SECTIONS = [
    "ledger",
    "ettr",
    "rates",
    "second_order",
    "investment",
    "queue",
    "periods",
    "nodes",
    "lemons",
    "checks",
    "sources",
]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    files = write_story(folder / "files")
    import_sources([files], folder / "fleet", reading=Reading(), say=lambda line: None)
    return folder / "fleet"


@pytest.fixture(scope="module")
def report(story):
    return report_of_fleet(story, ReportOptions(group="account", changes=(f"{when(45 * DAY)}+00:00",)))


def sheets(report):
    body = json.loads(report_json(report))
    return {key: sheet["rows"] for section in body["sections"].values() for key, sheet in section["sheets"].items()}


def test_all_sections_are_there_in_order(report):
    assert [section.key for section in report.sections] == SECTIONS
    assert all(section.words for section in report.sections)


def test_the_ledger_adds_up(report):
    lines = sheets(report)["ledger"]
    assert sum(line["share"] for line in lines) == pytest.approx(1.0, abs=1e-12)
    assert "difference 0 us, largest of one attempt 0 us" in report.sections[0].words[0]
    by_size = sheets(report)["ledger_by_size"]
    total = sum(value for row in by_size for name, value in row.items() if name != "size")
    assert total == pytest.approx(sum(line["gpu_hours"] for line in lines))


def test_the_planted_failure_rate_is_inside_every_interval_but_a_few(report):
    rows = [row for row in sheets(report)["rates_by_size"] if row["size"] != "1-8"]
    inside = [row["low"] <= 20.0 <= row["high"] for row in rows]
    assert len(rows) >= 6
    assert sum(inside) >= len(rows) - 1


def test_measured_ratios_are_between_0_and_1_and_fall_with_size(report):
    cells = sheets(report)["ettr_size"]
    assert all(0 < cell["low"] <= cell["of_sums"] <= cell["high"] <= 1 for cell in cells)
    assert cells[-1]["of_sums"] < cells[1]["of_sums"]
    assert {cell["group"] for cell in sheets(report)["ettr_group"]} == {"team0", "team1", "team2"}


def test_preemptions_go_back_to_the_failures_that_caused_them(report):
    (sums,) = sheets(report)["second_order"]
    assert sums["victims"] > 50
    assert sums["unexplained"] <= 0.02 * sums["victims"]
    assert sums["low"] <= sums["share"] <= sums["high"]


def test_periods_and_dates_without_an_effect_cannot_tell_or_nearly(report):
    verdicts = [row["verdict"] for row in sheets(report)["periods"]]
    assert sum(verdict.startswith("cannot tell") for verdict in verdicts) >= len(verdicts) - 1
    (change,) = sheets(report)["changes"]
    assert change["low"] < 1 < change["high"]


def test_projections_stand_apart(report):
    largest = max(int(row["size"].split("-")[1]) for row in sheets(report)["rates_by_size"])
    assert min(row["gpus"] for row in sheets(report)["projections"]) == 2 * largest
    assert report.sheet("projections").title.startswith("PROJECTION")


def test_any_number_of_parts_gives_the_same_report(story):
    assert report_json(report_of_fleet(story, ReportOptions(), parts=3)) == report_json(
        report_of_fleet(story, ReportOptions(), parts=1)
    )


def test_the_page_is_one_file_with_charts(report):
    page = report_html(report)
    assert page.count("<svg") == 7
    assert "<script" not in page
    outside = set(re.findall(r'(?:href|src)="(?!#)([^"]+)"', page))
    assert outside == set()
    assert {name for name in SECTIONS if f'id="{name}"' in page} == set(SECTIONS)
    assert report_html(report) == page


def test_words_of_others_are_escaped_in_the_page(tmp_path):
    rows = "JobIDRaw|JobID|JobName|User|Partition|State|Submit|Start|End|NNodes|AllocTRES|NodeList"
    job = "1|1|<b>x</b>|u|<script>alert(1)</script>|COMPLETED|{0}|{0}|{1}|1|gres/gpu=8|n1"
    (tmp_path / "sacct.txt").write_text(f"{rows}\n{job.format(when(0), when(7200))}\n")
    import_sources([tmp_path / "sacct.txt"], tmp_path / "fleet", reading=Reading(), say=lambda line: None)
    page = printed_report(tmp_path / "fleet", ReportOptions(), style="html")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("width", [80, 120, 200])
def test_text_keeps_to_its_width(report, width):
    lines = report_text(report, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert "\x1b" in report_text(report, width=width, colour=True)


def test_json_has_no_numbers_that_json_does_not_know(report):
    def numbers(value):
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                yield from numbers(part)
        elif isinstance(value, float):
            yield value

    assert all(map(math.isfinite, numbers(json.loads(report_json(report)))))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The public trace as a table of node intervals; its days have no date."""
    folder = tmp_path_factory.mktemp("trace")
    lines = ["node,kind,start,end,level,class,description"]
    lines += [
        f"node{row['node']},fault,{iso(row['start_day'])},{iso(row['end_day'])},{row['level']},{row['class']},"
        for row in fault_rows()
    ]
    (folder / "node_intervals.csv").write_text("\n".join(lines) + "\n")
    import_sources([folder / "node_intervals.csv"], folder / "fleet", reading=Reading(), say=lambda line: None)
    return report_of_fleet(folder / "fleet", ReportOptions(nodes=400, days=348.0))


def iso(day):
    from datetime import UTC, datetime, timedelta

    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=float(day))).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def test_the_report_of_the_public_trace_gives_its_known_figures(trace):
    found = sheets(trace)
    assert [row["episodes"] for row in found["episodes"]] == [582, 479, 452, 401]
    assert [row["shape"] for row in found["fault_gaps"]] == pytest.approx([0.404, 0.49], abs=6e-3)
    flags = {row["rule"]: (row["hits"], row["flagged"]) for row in found["lemon_rules"]}
    assert [flags[f">= {least} in 28 days"] for least in (1, 2, 3)] == [(78, 362), (30, 100), (9, 29)]
    words = " ".join(trace.sections[0].words)
    assert "4.195 [3.914, 4.492] at 90%" in words
    assert "214 of 529 (0.405; 0.111 if faults were independent)" in words
    assert "3,231.3 node-days down, 97.68% available" in words


def test_that_no_better_rule_is_found_is_said(trace):
    assert "no rule tried is told apart from >= 2 in 28 days at equal flags" in trace.sections[1].words[1]


def test_a_fleet_without_jobs_says_so(trace):
    assert [section.key for section in trace.sections] == ["nodes", "lemons", "checks", "sources"]
    assert "no attempt on GPUs" in trace.about[1]


def test_mistakes_are_one_line(tmp_path, story, capsys):
    assert main(["fleet", "report", str(tmp_path)]) == 2
    assert main(["fleet", "report", str(story), "--change", "yesterday"]) == 2
    assert main(["fleet", "report", str(story), "--group", "colour"]) == 2
    assert main(["fleet", "report", str(story), "--format", "json", "--out", str(tmp_path / "none" / "x")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("keepstep: ") for line in lines)


def test_a_fleet_of_nothing_still_reports(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    import_sources([tmp_path / "empty.txt"], tmp_path / "fleet", reading=Reading(), say=lambda line: None)
    found = report_of_fleet(tmp_path / "fleet", ReportOptions())
    assert [section.key for section in found.sections] == ["nodes", "lemons", "checks", "sources"]
    assert "<svg" not in report_html(found)


ODD = """JobIDRaw|JobID|JobName|User|Partition|State|Submit|Start|End|NNodes|AllocTRES|NodeList
1|1|a|u|p|RUNNING|2025-01-01T00:00:00|2025-01-01T01:00:00|Unknown|1|gres/gpu=8|n1
2|2|b|u|p|PENDING|2025-01-01T00:00:00|Unknown|Unknown|1||None assigned
3|3|c|u|p|NODE_FAIL|2025-01-02T00:00:00|2025-01-02T01:00:00|2025-01-02T01:00:00|1|gres/gpu=8|n1
4|4|d|u|p|COMPLETED|2025-01-02T00:00:00|2025-01-02T01:00:00|2025-01-01T01:00:00|1|gres/gpu=8|n1
5|5|e|u|p|COMPLETED|1970-01-01T00:00:00|1970-01-01T01:00:00|2099-01-01T01:00:00|9999999|gres/gpu=99999999|n1
6|6|f|u|p|FAILED|2025-01-02T00:00:00|2025-01-02T01:00:00|2025-01-02T02:00:00|1||n1
"""


def test_odd_accounts_end_in_a_report(tmp_path):
    (tmp_path / "sacct.txt").write_text(ODD)
    import_sources([tmp_path / "sacct.txt"], tmp_path / "fleet", reading=Reading(), say=lambda line: None)
    found = report_of_fleet(tmp_path / "fleet", ReportOptions(changes=("2025-01-01", "2030-01-01")))
    assert "difference 0 us" in found.sections[0].words[0]
    assert json.loads(report_json(found))
    assert report_text(found)
    assert report_html(found).endswith("</html>")


def test_an_unknown_column_of_groups_is_refused(story):
    with pytest.raises(UsageError, match="no column of groups"):
        report_of_fleet(story, ReportOptions(group="; DROP TABLE attempts"))


def test_the_command_writes_a_file(tmp_path, story):
    page = tmp_path / "report.html"
    assert main(["fleet", "report", str(story), "--format", "html", "--out", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")


SOURCES = Path(__file__).resolve().parents[3] / "shared" / "data" / "slurm"


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the full data sets are not here")
@pytest.mark.parametrize("cluster", ["cluster_a", "cluster_c", "gcm"])
def test_a_report_on_real_accounts_adds_up(cluster, tmp_path):
    files = sorted(path for path in (SOURCES / cluster).iterdir() if "sacct" in path.name)
    import_sources(files, tmp_path / "fleet", reading=Reading(), say=lambda line: None)
    found = report_of_fleet(tmp_path / "fleet", ReportOptions())
    if found.sections[0].key == "ledger":
        assert "difference 0 us" in found.sections[0].words[0]
    assert found.sections[-1].key == "sources"


@pytest.mark.long
def test_ray_gives_the_same_report(story):
    pytest.importorskip("ray")
    one, other = (report_of_fleet(story, ReportOptions(), engine=engine, parts=3) for engine in ("ray", "local"))
    assert report_json(one) == report_json(other)
