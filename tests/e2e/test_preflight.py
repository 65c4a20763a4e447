"""Scripts tried out in a world of any size: good ones give no finding, every planted mistake is named with its line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import LIMIT_S, SCRIPTS, keepstep, one_line, until

from keepstep.cli import main
from keepstep.service.preflight_text import preflight_text
from keepstep.service.preflighting import PreflightReport, PreflightRequest, open_nursery, preflight
from keepstep.service.trials import Nursery

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTY = SCRIPTS / "faulty.py"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One process that imported torch, for all trials of this file."""
    with open_nursery(tmp_path_factory.mktemp("nursery")) as process:
        yield process


def tried(nursery: Nursery, script: Path, *arguments: object, world: int = 4, **options) -> PreflightReport:
    request = PreflightRequest(script=str(script), arguments=tuple(map(str, arguments)), world=world, **options)
    said: list[str] = []
    report = preflight(request, say=said.append, nursery=nursery)
    assert len(said) >= len(report.ranks) > 0
    assert preflight_text(report).count("\n") > len(report.ranks)
    return report


def source_line(site: str) -> str:
    file, _, line = site.rpartition(":")
    return Path(file).read_text().splitlines()[int(line) - 1]


QUICK = [
    ("group-order", "groups_disagree", None, "made = [(ranks, dist.new_group(ranks))"),
    ("conditional", "calls_differ", (0,), "dist.all_reduce(torch.ones(3))"),
    ("no-receive", "send_without_receive", (0, 2), "dist.send("),
]
SLOW = [
    ("group-ranks", "groups_disagree", (7,), "for ranks in replicas"),
    ("group-not-made", "group_not_made", (0,), "for ranks in replicas"),
    ("mesh", "meshes_disagree", (0,), "init_device_mesh"),
    ("width", "sizes_differ", None, "dist.all_reduce(part, group=pair)"),
    ("reduction", "calls_differ", None, "ReduceOp.MAX"),
    ("dtype", "calls_differ", None, "part.double()"),
    ("op", "calls_differ", None, "dist.broadcast(part"),
    ("shape", "calls_differ", (7,), "torch.ones(5)"),
    ("crossed", "deadlock", tuple(range(8)), "group=group"),
    ("no-send", "receive_without_send", (0, 4), "dist.recv("),
    ("receive-size", "transfer_differs", (0, 4), "dist.send("),
    ("rank-before-join", "rank_before_join", tuple(range(8)), "os.environ.get"),
    ("assert", "does_not_divide", (1,), "assert args.width % 3 == 0"),
]


def check_fault(report: PreflightReport, kind: str, ranks: tuple[int, ...] | None, line: str) -> None:
    found = report.findings[0]
    assert report.exit_code == 1
    assert found.kind == kind and found.what and found.remedy
    assert ranks is None or found.ranks == ranks
    assert any(line in source_line(site) for site in found.sites), found


@pytest.mark.parametrize(("fault", "kind", "ranks", "line"), QUICK, ids=[row[0] for row in QUICK])
def test_a_planted_mistake_is_named(nursery, fault, kind, ranks, line):
    check_fault(tried(nursery, FAULTY, "--fault", fault), kind, ranks, line)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "kind", "ranks", "line"), SLOW, ids=[row[0] for row in SLOW])
def test_every_planted_mistake_is_named(nursery, fault, kind, ranks, line):
    check_fault(tried(nursery, FAULTY, "--fault", fault, world=8), kind, ranks, line)


@pytest.mark.long
def test_sizes_data_time_and_memory(nursery):
    (finding,) = tried(nursery, FAULTY, "--width", 18).findings
    assert finding.kind == "does_not_divide" and finding.ranks == (0, 1, 2, 3)
    assert "width 18 is not divisible by 4 ranks" in finding.what
    (finding,) = tried(nursery, FAULTY, "--points", 3).findings
    assert finding.kind == "too_few_batches" and finding.ranks == (0, 1)
    (finding,) = tried(nursery, FAULTY, "--fault", "one-pass", "--steps", 5000).findings
    assert finding.kind == "too_few_batches" and "1024 batches for 5000 steps" in finding.what
    (finding,) = tried(nursery, FAULTY, "--fault", "hang", trial_s=10.0).findings
    assert finding.kind == "hang" and finding.ranks == (3,) and "time.sleep(600)" in source_line(finding.sites[0])
    (finding,) = tried(nursery, FAULTY, "--fault", "reads-memory", memory_bytes=1 << 30).findings
    assert finding.kind == "memory" and finding.ranks == (0,)
    report = tried(nursery, FAULTY, local=4, node_bytes=1 << 28)
    assert [one.kind for one in report.findings] == ["memory"] and report.memory is not None
    assert report.memory.modelled_bytes > report.memory.measured_bytes > 1 << 26


def test_a_good_script_gives_no_finding_and_says_what_was_not_looked_at(nursery):
    report = tried(nursery, FAULTY, world=8)
    assert report.findings == [] and report.exit_code == 0
    assert {one.ended for one in report.ranks} == {"steps"} and {one.steps for one in report.ranks} == {2}
    assert report.not_looked_at == ["devices other than the CPU, and the network"]


@pytest.mark.long
@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize("script", sorted(path.name for path in (EXAMPLES / "layouts").glob("*.py")))
def test_no_false_alarm_on_the_layouts(nursery, script, world):
    path = EXAMPLES / "layouts" / script
    if "keepstep.join" not in path.read_text():
        pytest.skip("what the layouts share")
    arguments = ("--batch-size", 4) if "options(" in path.read_text() else ()
    report = tried(nursery, path, *arguments, world=world)
    assert report.findings == [] and all(one.ended == "steps" for one in report.ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("toy.py", ()),
        ("toy.py", ("--fsdp", "--tail")),
        ("two_optimizers.py", ()),
        ("live.py", ()),
        ("gloo.py", ("--checkpoint", "none.pt")),
        ("plain.py", ()),
    ],
)
def test_no_false_alarm_on_other_scripts(nursery, script, arguments, tmp_path):
    report = tried(nursery, SCRIPTS / script, *arguments, world=8)
    assert report.findings == []


@pytest.mark.long
def test_the_example_in_a_world_of_1024(nursery):
    report = tried(nursery, EXAMPLES / "gpt" / "train.py", "--steps", 60, world=1024, roles=(700,))
    assert report.findings == []
    assert {0, 1023, 512, 700} <= {one.rank for one in report.ranks} and len(report.ranks) <= 16


def test_files_and_processes_of_a_script_do_not_get_out(nursery, tmp_path):
    (tmp_path / "kept.txt").write_text("as it was")
    (tmp_path / "gone.txt").write_text("still here")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file.txt").write_text("too")
    before = sorted(tmp_path.rglob("*"))
    report = tried(nursery, SCRIPTS / "untidy.py", tmp_path, world=2)
    assert report.findings == [] and {one.ended for one in report.ranks} == {"steps"}
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "kept.txt").read_text() == "as it was"
    notes = "\n".join(report.notes)
    for name in ("kept.txt", "weights.pt", "gone.txt", "the process"):
        assert name in notes, notes
    assert any("not call keepstep.join()" in said for said in report.not_looked_at)


def test_a_second_trial_of_a_rank_finds_nothing_of_the_first(nursery, tmp_path):
    """The first one of rank 0 ends where it needs an object of rank 1, as that of a pipeline's stage does."""
    script, made = tmp_path / "twice.py", tmp_path / "made"
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nos.mkdir(sys.argv[1])\n"
        "if dist.get_rank() == 1:\n    dist.send_object_list([7], dst=0)\n"
        "else:\n    got = [None]\n    dist.recv_object_list(got, src=1)\n    assert got == [7]\n"
    )
    report = tried(nursery, script, made, world=2)
    assert report.findings == [] and {one.ended for one in report.ranks} == {"script"}
    assert not made.exists()


def test_the_command_line(tmp_path, monkeypatch, capsys):
    script = tmp_path / "ends.py"
    script.write_text(
        "import sys\nif '--bad' in sys.argv: raise ValueError('3 heads on 2 ranks do not divide evenly')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["preflight", "ends.py", "--as-world", "2", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == [] and report["arguments"] == []
    assert main(["preflight", "ends.py", "--bad", "--as-world", "2", "--", "--steps", "9"]) == 1
    said = capsys.readouterr()
    assert "does_not_divide: ranks 0, 1: ValueError: 3 heads" in said.out and "ends.py:2" in said.out
    assert "rank 1: error after" in said.err and "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == [script]


def test_one_that_is_told_to_stop_leaves_nothing(tmp_path):
    """G-16"""
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "temporary").mkdir()
    words = (sys.executable, "-m", "keepstep.cli", "preflight", "waits.py", "--as-world", "2")
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until(lambda: list(tmp_path.glob("temporary/keepstep-*/nursery.out")), "its directory")
    process.terminate()
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM and b"Traceback" not in said
    assert list(tmp_path.glob("temporary/keepstep-*")) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--as-world", 4, "missing.py"), "no such script"),
        (("--as-world", 4, "."), "is a directory"),
        (("--as-world", "many", "good.py"), "--as-world"),
        (("--as-world", 0, "good.py"), "--as-world"),
        (("good.py",), "--as-world"),
        (("good.py", "--as-world", 10**9), "1 to 65536"),
        (("good.py", "--as-world", 4, "--role", 4), "no rank 4"),
        (("good.py", "--as-world", 4, "--role", -1), "--role"),
        (("good.py", "--as-world", 4, "--steps", 60), "1 or 2"),
        (("good.py", "--as-world", 4, "--memory", 0), "--memory"),
        (("wrong.py", "--as-world", 4), "wrong.py:2"),
        (("binary.py", "--as-world", 4), "cannot be parsed"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, says):
    (tmp_path / "good.py").write_text("pass\n")
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\0\xff\x00")
    assert says in one_line(keepstep("preflight", *words, cwd=tmp_path))
