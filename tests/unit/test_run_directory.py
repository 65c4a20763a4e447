"""One directory, one job: never mixed, written whole or not at all, left as found when nothing came of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from keepstep.errors import EnvironmentProblem, StoreError, UsageError
from keepstep.service.control_socket import ask_probe
from keepstep.service.run_directory import REPORT_FILE, RunDirectory, RunFacts, is_running, mount_of, read_run

FACTS = RunFacts("job7", "s.py", ("--x",), 4, 1, 1, "v", "v", "v", 1.0, 1, "socket")


def test_a_run_can_be_found_while_it_is_held_and_after(tmp_path):
    directory = RunDirectory(tmp_path / "deep" / "run", reserve_bytes=0)
    directory.publish(FACTS)
    assert read_run(directory.path) == FACTS and is_running(directory.path)
    directory.close()
    assert read_run(directory.path) == FACTS and not is_running(directory.path)


def test_a_directory_in_use_is_refused(tmp_path):
    directory = RunDirectory(tmp_path / "run", reserve_bytes=0)
    with pytest.raises(UsageError, match="going on"):
        RunDirectory(tmp_path / "run", reserve_bytes=0)
    directory.close()


@pytest.mark.parametrize(("report", "says"), [(True, "has finished"), (False, "without a report")])
def test_a_directory_of_another_job_is_refused(tmp_path, report, says):
    directory = RunDirectory(tmp_path, reserve_bytes=0)
    directory.publish(FACTS)
    if report:
        directory.write(REPORT_FILE, b"{}")
    directory.close()
    with pytest.raises(UsageError, match=f"job7.*{says}"):
        RunDirectory(tmp_path, reserve_bytes=0)
    assert read_run(tmp_path) == FACTS


def test_other_files_are_never_mixed_with_a_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        RunDirectory(tmp_path, reserve_bytes=0)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_token_that_was_there_before_stays_where_no_run_begins(tmp_path):
    """A person has made it and copied it to the nodes; what the controller made itself goes."""
    (tmp_path / "token").write_text("of a person")
    RunDirectory(tmp_path, reserve_bytes=0).close()
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    (tmp_path / "token").unlink()
    directory = RunDirectory(tmp_path, reserve_bytes=0)
    (tmp_path / "token").write_text("of the controller")
    directory.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("existing", [True, False])
def test_what_never_became_a_run_leaves_nothing(tmp_path, existing):
    path = tmp_path / "run"
    if existing:
        path.mkdir()
    RunDirectory(path, reserve_bytes=0).close()
    assert path.exists() is existing and (not existing or list(path.iterdir()) == [])


def test_too_little_space_is_one_clear_line(tmp_path):
    with pytest.raises(EnvironmentProblem, match="disk is full"):
        RunDirectory(tmp_path / "run", reserve_bytes=1 << 60)
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        RunDirectory(tmp_path / "run", reserve_bytes=0)


def test_a_report_that_cannot_be_written_names_the_disk(tmp_path):
    directory = RunDirectory(tmp_path / "run", reserve_bytes=0)
    directory.publish(FACTS)
    (directory.path / REPORT_FILE).mkdir()
    with pytest.raises(StoreError) as caught:
        directory.write(REPORT_FILE, b"{}")
    directory.close()
    assert f"disk mounted at {mount_of(tmp_path)}" in str(caught.value) and "--run" not in str(caught.value)
    assert caught.value.exit_code == 74


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00"])
def test_a_damaged_run_file_is_a_clear_error(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match="damaged"):
        read_run(tmp_path)


def test_no_run_at_all(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        read_run(tmp_path)


@contextlib.contextmanager
def another_user():
    """Root may do everything; it takes another name for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("closed", [".", "run.lock"])
def test_the_run_of_another_user_is_called_that(closed):
    with tempfile.TemporaryDirectory() as place:  # pytest's own folder is closed to others as a whole
        path = Path(place, "run")
        directory = RunDirectory(path, reserve_bytes=0)
        directory.publish(FACTS)
        Path(place).chmod(0o755)
        path.chmod(0o755)
        (path / closed).chmod(0o000)
        with another_user(), pytest.raises(UsageError, match=r"may not read.*as the user who started"):
            ask_probe(path, 1)
        path.chmod(0o700)
        directory.close()
