"""Every mistake: one clear line, an exit code that is not 0, nothing lost, no process left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import LIMIT_S, MEMBER, PLAIN, keepstep, one_line, started, until


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "missing.py"), "no such script"),
        (("run", "."), "is a directory"),
        (("run", "--nproc-per-node", "0", PLAIN), "nproc_per_node"),
        (("run", "--nproc-per-node", "two", PLAIN), "--nproc-per-node"),
        (("run", "--settings", "missing.toml", PLAIN), "missing.toml"),
        (("run", "--log-level", "loud", PLAIN), "log_level"),
        (("run", "--no-such-option", PLAIN), "--no-such-option"),
        (("run",), "script"),
        (("report", "."), "not a run directory"),
        (("drill", "kill", "--run", ".", "--rank", "1"), "not a run directory"),
        (("drill", "kill", "--run", ".", "--rank", "one"), "--rank"),
        (("drill", "kill", "--run", ".", "--rank", "1", "--at-step", "-2"), "--at-step"),
        (("drill", "melt", "--run", ".", "--rank", "1"), "melt"),
        (("clean", "--run-root", "missing"), "no such directory"),
        (("agent", "--controller", "127.0.0.1:1"), "token"),
        (("controller", "--nnodes", "0", PLAIN), "--nnodes"),
        (("fly",), "fly"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path, words, says):
    assert says in one_line(keepstep(*words, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_directories_are_never_mixed(tmp_path):
    assert keepstep("run", "--run", "run", PLAIN, cwd=tmp_path).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "has finished" in one_line(keepstep("run", "--run", "run", PLAIN, cwd=tmp_path))
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years")
    assert "thesis.txt" in one_line(keepstep("run", "--run", "other", PLAIN, cwd=tmp_path))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of two ranks that goes on until it is told to end."""
    job = started("run", "--nproc-per-node", 2, "--run", "run", MEMBER, "--steps", 9999, cwd=tmp_path)
    until((tmp_path / "run" / "run.json").is_file, "run.json")
    yield job
    job.terminate()
    job.communicate(timeout=LIMIT_S)


def test_a_running_jobs_directory_and_nonsense_drills(tmp_path, running):
    assert "going on" in one_line(keepstep("run", "--run", "run", PLAIN, cwd=tmp_path))
    for rank in (2, -1, 999999):
        assert f"no rank {rank}" in one_line(keepstep("drill", "kill", "--run", "run", "--rank", rank, cwd=tmp_path))
    assert running.poll() is None


def test_a_drill_of_a_run_that_is_over(tmp_path):
    assert keepstep("run", "--run", "run", PLAIN, cwd=tmp_path).returncode == 0
    assert "is over" in one_line(keepstep("drill", "kill", "--run", "run", "--rank", 0, cwd=tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--version", "0.0.1"), "keepstep 0.0.1"), (("--world", "3"), "world of 3")],
    ids=["two versions", "world sizes"],
)
def test_members_that_disagree_end_the_job(tmp_path, words, says):
    done = keepstep("run", "--nproc-per-node", 2, MEMBER, *words, cwd=tmp_path)
    assert done.returncode == 76
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_standby_that_cannot_start_is_named_and_the_job_runs_on(tmp_path):
    script = tmp_path / "needs_rank.py"
    script.write_text(f"import os\nassert 'RANK' in os.environ\nexec(open({MEMBER!r}).read())  # keepstep\n")
    words = ("run", "--nproc-per-node", 2, "--standby", 1, "--run", "run", script, "--steps", 9999)
    job = started(*words, cwd=tmp_path)
    assert job.stderr is not None
    said = next(line for line in job.stderr if "runs on" in line)
    assert "standby" in said and job.poll() is None
    job.terminate()
    _, rest = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 143 and "stopped by SIGTERM" in rest


def test_a_port_in_use(tmp_path):
    first = started("controller", "--port", 0, "--run", "first", "--nnodes", 2, PLAIN, cwd=tmp_path)
    assert first.stderr is not None
    port = first.stderr.readline().split(",")[0].rsplit(":", 1)[1]
    line = one_line(keepstep("controller", "--port", port, "--run", "second", PLAIN, cwd=tmp_path))
    first.terminate()
    first.communicate(timeout=LIMIT_S)
    assert "port is in use" in line and not (tmp_path / "second").exists()


def test_no_room_under_the_run_directory(tmp_path):
    (tmp_path / "keepstep.toml").write_text(f"reserve_bytes = {1 << 60}")
    assert "disk is full" in one_line(keepstep("run", "--run", "run", PLAIN, cwd=tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_stops_no_training(tmp_path, small_disk):
    (tmp_path / "keepstep.toml").write_text("reserve_bytes = 0")
    script = tmp_path / "chatty.py"
    script.write_text(
        "import time\nfor i in range(300):\n    print('x' * 2000)\n    time.sleep(0.002)\nprint('the end')\n"
    )
    done = keepstep("run", "--run", small_disk / "run", script, cwd=tmp_path)
    assert done.returncode == 74, done.stderr[-2000:]
    assert "[rank 0] the end" in done.stdout
    assert f"disk mounted at {small_disk}" in done.stderr and "--run" not in done.stderr
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
