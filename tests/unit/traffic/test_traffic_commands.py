"""`keepstep traffic` as people call it: output as text and JSON, drawings, exit codes, one line for mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from defusedxml import ElementTree

from keepstep.cli.entry import main

DATA = Path(__file__).parents[2] / "data" / "topology"
LAB = "keepstep_topology: 1\nname: lab\nclos: {hosts: 16, hosts_per_leaf: 4, spines: 4, port_gbps: 400}\n"


@pytest.fixture
def lab(tmp_path):
    (tmp_path / "lab.yaml").write_text(LAB)
    for job in range(4):
        hosts = ", ".join(f"h{job + leaf * 4}" for leaf in range(4))
        text = f"keepstep_job: 1\njob: job{job}\nhosts: [{hosts}]\nranks_per_host: 1\nstep_s: 0.5\n"
        text += "collectives: [{group: dp, op: all_reduce, bytes: 2e9}]\n"
        (tmp_path / f"job{job}.yaml").write_text(text)
    return tmp_path


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["traffic", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def jobs(lab):
    return sorted(lab.glob("job*.yaml"))


def test_show_prints_and_draws(capsys, tmp_path):
    svg, yaml = tmp_path / "t.svg", tmp_path / "t.yaml"
    code, out, _ = run(capsys, "show", DATA / "lingjun/topo.csv", "--svg", svg, "--yaml", yaml)
    assert (code, "847 hosts" in out, "48 leaves" in out) == (0, True, True)
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    again = run(capsys, "show", yaml, "--format", "json")
    assert len(json.loads(again[1])["topology"]["ports"]) == 847


@pytest.mark.parametrize("command", ["show", "plan"])
def test_files_are_written_before_anything_is_printed(lab, monkeypatch, command):
    """The reader of the text may be gone, as with `| head -2`."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    svg = lab / "t.svg"
    files = [str(lab / "lab.yaml"), *(str(lab / "job0.yaml") for _ in range(command == "plan"))]
    monkeypatch.setattr(sys, "stdout", Closed())
    with contextlib.suppress(BrokenPipeError):
        main(["traffic", command, *files, "--svg", str(svg)])
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")


def test_a_drawing_that_cannot_be_made_is_told(capsys, lab):
    xml, svg = DATA / "rccl/topo_16p1h.xml", lab / "x.svg"
    assert run(capsys, "show", xml)[0] == 0
    code, out, _ = run(capsys, "show", xml, "--svg", svg)
    assert (code, svg.exists()) == (65, False)
    assert out.splitlines()[-1].startswith(f"  {svg} is not drawn: no switches: it describes hosts only")


def test_plan_meets_the_bound(capsys, lab):
    code, out, _ = run(capsys, "plan", lab / "lab.yaml", *jobs(lab), "--svg", lab / "plan.svg", "--format", "json")
    plan = json.loads(out)
    assert (code, plan["max_load"], plan["bound"], plan["gap"]) == (0, 1.0, 1.0, 0.0)
    assert len(plan["routes"]) == 16
    assert (lab / "plan.svg").stat().st_size > 1000


def test_flows_on_unequal_cables_are_counted_in_proportion(capsys, lab):
    """Two ways of 300 and 100 Gbit/s: of four flows three take the wide one."""
    (lab / "wide.yaml").write_text(
        "keepstep_topology: 1\ngbps: 100\nswitches: [{name: 'l[0-1]', tier: 1}, {name: 's[0-1]', tier: 2}]\n"
        "hosts: [{name: 'h[0-3]', leaf: l0}, {name: 'h[4-7]', leaf: l1}]\n"
        "cables: [{lower: 'l[0-1]', upper: s0, gbps: 300}, {lower: 'l[0-1]', upper: s1}]\n"
    )
    for job in range(4):
        text = f"keepstep_job: 1\njob: w{job}\nhosts: [h{job}, h{job + 4}]\nranks_per_host: 1\n"
        (lab / f"w{job}.yaml").write_text(text + "collectives: [{group: dp, op: all_reduce, bytes: 2e9}]\n")
    code, out, _ = run(capsys, "plan", lab / "wide.yaml", *sorted(lab.glob("w?.yaml")), "--everything", "--routes")
    assert (code, out.count("l0 > s0 > l1"), out.count("l0 > s1 > l1")) == (0, 3, 1)
    assert "3 flows on a cable of the fastest kind (slower ones in proportion)" in out


def test_plan_with_a_dead_spine_and_by_bytes(capsys, lab):
    code, out, _ = run(capsys, "plan", lab / "lab.yaml", *jobs(lab), "--down", "spine0", "--by-bytes", "--routes")
    assert (code, "linear program" in out, "spine0" in out.split("down:")[1].splitlines()[0]) == (0, True, True)
    assert " > spine0 > " not in out


def test_model_compares(capsys, lab):
    code, out, _ = run(capsys, "model", lab / "lab.yaml", *jobs(lab), "--format", "json", "--seeds", "5")
    found = json.loads(out)
    assert (code, found["modelled"]) == (0, True)
    assert all(one["gain"] >= 1.0 for one in found["jobs"])


def test_export_names_what_it_cannot(capsys, lab):
    xml = DATA / "rccl/topo_4p2h_2nic.xml"
    code, out, _ = run(
        capsys, "export", lab / "lab.yaml", lab / "job0.yaml", "--host-nics", xml, "--traffic-class", 106
    )
    assert code == 0
    assert "NCCL_IB_HCA='=mlx5_0,mlx5_1'" in out
    assert "NCCL_TOPO_FILE" in out
    assert "not run here" in out


def test_a_site_over_several_calls(capsys, lab):
    site = lab / "site"
    calls = [("--start", lab / "lab.yaml"), ("--arrive", lab / "job0.yaml"), ("--arrive", lab / "job1.yaml")]
    for words in calls:
        code, _, err = run(capsys, "site", site, *words, "--stage", "low_priority", "--everything")
        assert (code, err) == (0, "")
    code, out, _ = run(capsys, "site", site, "--down", "leaf0>spine1", "--leave", "job0", "--outcome", "1.2")
    assert code == 0
    assert "leave job0" in out and "measured 1.20x" in out


def test_a_link_that_was_not_down_is_told_in_one_line(capsys, lab):
    site = lab / "site"
    run(capsys, "site", site, "--start", lab / "lab.yaml", "--down", "leaf0>spine1")
    code, out, _ = run(capsys, "site", site, "--up", "leaf0>spine2", "--up", "spine1", "--down", "leaf0>spine1")
    assert (code, out.splitlines()[:3], "restore" in out) == (
        0,
        [
            "note: leaf0>spine1 was down already; nothing changed",
            "note: leaf0>spine2 was not down; nothing changed",
            "note: spine1 was not down, but leaf0>spine1 is; nothing changed",
        ],
        False,
    )
    code, out, _ = run(capsys, "site", site, "--up", "leaf0>spine1")
    assert (code, out.splitlines()[-1].endswith("[leaf0>spine1 back]")) == (0, True)


def test_published_figures_say_that_they_are_modelled(capsys):
    code, out, _ = run(capsys, "published", "--seeds", "3")
    assert (code, "modelled" in out, "360.0" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "none.yaml"], 65, "No such file"),
        (["plan", "lab.yaml", "none.yaml"], 65, "No such file"),
        (["plan", "lab.yaml", "lab.yaml"], 65, "not a job file"),
        (["plan", "lab.yaml", "job0.yaml", "job0.yaml"], 65, "two job files"),
        (["plan", "lab.yaml", "job0.yaml", "--down", "x>y"], 65, "no link"),
        (["plan", "lab.yaml", "job0.yaml", "--down", "spine0>"], 65, "no link"),
        (["site", "nowhere", "--outcome", "nan"], 2, "outcome"),
        (["show", "lab.yaml", "--spines", "100000000"], 2, "spines"),
        (["show", "lab.yaml", "--gbps", "nan"], 2, "'--gbps': nan is not a number above 0"),
        (["plan", "lab.yaml", "job0.yaml", "--gbps", "0"], 2, "--gbps"),
        (["show", "lab.yaml", "--uplink-gbps=-3"], 2, "--uplink-gbps"),
        (["site", "nowhere", "--start", "lab.yaml", "--uplink-gbps", "inf"], 2, "--uplink-gbps"),
        (["model", "lab.yaml", "job0.yaml", "--efficiency", "nan"], 2, "--efficiency"),
        (["plan", "lab.yaml", "away.yaml"], 65, "not in the topology"),
        (["plan", "host.xml", "job0.yaml"], 65, "hosts only"),
        (["export", "lab.yaml", "job0.yaml", "--traffic-class", "999"], 2, "--traffic-class"),
        (["show", "lab.yaml", "--svg", "lab.yaml"], 2, "written over"),
        (["show", "lab.yaml", "--svg", "new.svg", "--yaml", "new.svg"], 2, "written over"),
        (["plan", "lab.yaml", "job0.yaml", "--svg", "./job0.yaml"], 2, "written over"),
        (["plan", "lab.yaml", "silent.yaml"], 65, "collective 1 has no `bytes`"),
        (["export", "lab.yaml", "lines.yaml"], 65, r"the name 'a\nb' has"),
        (["show", "odd.yaml"], 65, r"the name 'h\x1b' has"),
        (["observe", ".", "lab.yaml", "--job", "a\tb"], 65, "--job"),
        (["site", "nowhere"], 2, "no site"),
        (["observe", ".", "lab.yaml"], 2, "no recorder ring"),
        (["model", "lab.yaml", "job0.yaml", "--seeds", "0"], 2, "seeds"),
        (["observe", "none", "lab.yaml"], 2, "no such directory"),
        (["probe", "127.0.0.1:1", "--method", "round_trip"], 2, "no token for a sink is given"),
    ],
)
def test_a_mistake_is_one_line(capsys, lab, monkeypatch, words, code, said):
    monkeypatch.chdir(lab)
    (lab / "host.xml").write_bytes((DATA / "rccl/topo_4p2h_2nic.xml").read_bytes())
    job = (lab / "job0.yaml").read_text()
    (lab / "silent.yaml").write_text(job.replace(", bytes: 2e9", ""))
    (lab / "lines.yaml").write_text(job.replace("job: job0", r'job: "a\nb"'))
    (lab / "odd.yaml").write_text(f'{LAB.partition("clos")[0]}hosts: [{{name: "h\\e", leaf: a}}]\n')
    (lab / "away.yaml").write_text((lab / "job0.yaml").read_text().replace("h0,", "h77,"))
    found, _, err = run(capsys, *words)
    assert (found, said in err, err.count("\n")) == (code, True, 1), err


def test_show_prints_problems(capsys, tmp_path):
    (tmp_path / "t.yaml").write_text("keepstep_topology: 1\nswitches: [{name: a, tier: 1}, {name: b, tier: 1}]\n"
                                     "hosts: [{name: h, leaf: a, gbps: 1}, {name: i, leaf: b, gbps: 1}]\n")  # fmt: skip
    code, out, _ = run(capsys, "show", tmp_path / "t.yaml")
    assert (code, "0 spines above 2 leaves" in out) == (65, True)


def test_a_topology_without_hosts_is_no_success(capsys, tmp_path):
    (tmp_path / "t.yaml").write_text("keepstep_topology: 1\n")
    assert run(capsys, "show", tmp_path / "t.yaml")[0] == 65


def test_exported_values_are_words_of_a_shell(capsys, lab):
    xml = lab / "it's.xml"
    xml.write_bytes((DATA / "rccl/topo_4p2h_2nic.xml").read_bytes())
    _, out, _ = run(capsys, "export", lab / "lab.yaml", lab / "job0.yaml", "--host-nics", xml)
    (line,) = [line for line in out.splitlines() if "NCCL_TOPO_FILE=" in line]
    assert shlex.split(line) == ["export", f"NCCL_TOPO_FILE={xml}"]
