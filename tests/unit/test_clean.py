"""Retention: what goes, what stays, and what is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import UsageError
from keepstep.service.bundles import Retention
from keepstep.service.clean import FoundRun, chosen_for_removal, remove_old_evidence, remove_old_runs
from keepstep.service.run_directory import RunDirectory, RunFacts

RUNS = st.lists(
    st.builds(
        FoundRun, path=st.just(Path("r")), created=st.floats(0, 9), size=st.integers(0, 99), running=st.booleans()
    )
)


def facts(job: str, created: float) -> RunFacts:
    return RunFacts(job, "s.py", (), 1, 0, 1, "v", "v", "v", created, 1, "")


def finished(root: Path, job: str, created: float) -> Path:
    run = RunDirectory(root / job, reserve_bytes=0)
    run.publish(facts(job, created))
    run.close()
    return run.path


@given(RUNS, st.integers(0, 9), st.none() | st.integers(0, 300))
def test_the_rules(runs, keep, max_bytes):
    gone = chosen_for_removal(runs, keep=keep, max_bytes=max_bytes)
    assert not any(run.running for run in gone)
    left = sum(run.size for run in runs) - sum(run.size for run in gone)
    stays = [run for run in runs if not any(run is other for other in gone)]
    if max_bytes is not None and left > max_bytes:
        assert all(run.running for run in stays)
    if max_bytes is None:
        assert len(gone) <= max(0, len(runs) - keep)


def test_the_oldest_go_and_a_running_one_stays(tmp_path):
    old, new = finished(tmp_path, "old", 1.0), finished(tmp_path, "new", 3.0)
    running = RunDirectory(tmp_path / "running", reserve_bytes=0)
    running.publish(facts("running", 0.5))
    (tmp_path / "not-a-run").mkdir()
    assert remove_old_runs(tmp_path, keep=1, max_bytes=None) == [old]
    assert new.is_dir() and running.path.is_dir() and (tmp_path / "not-a-run").is_dir()
    assert remove_old_runs(tmp_path, keep=9, max_bytes=0) == [new]
    running.close()
    assert remove_old_runs(tmp_path, keep=0, max_bytes=None) == [running.path]


def test_a_canary_behind_which_no_job_began_is_a_run_that_goes(tmp_path):
    rejected, new = finished(tmp_path / "rejected", "canary", 1.0).parent, finished(tmp_path, "new", 3.0)
    going = RunDirectory(tmp_path / "going" / "canary", reserve_bytes=0)
    going.publish(facts("going", 0.5))
    assert remove_old_runs(tmp_path, keep=1, max_bytes=None) == [rejected]
    assert new.is_dir() and going.path.is_dir()
    going.close()


def test_a_link_is_not_followed(tmp_path):
    target = finished(tmp_path / "elsewhere", "a", 1.0)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(target)
    assert remove_old_runs(tmp_path / "root", keep=0, max_bytes=None) == [] and target.is_dir()


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        remove_old_runs(tmp_path / "none", keep=1, max_bytes=None)


def test_old_evidence_goes_from_runs_that_are_over_and_from_nowhere_else(tmp_path):
    over = finished(tmp_path, "over", 1.0)
    going = RunDirectory(tmp_path / "going", reserve_bytes=0)
    going.publish(facts("going", 2.0))
    for run in (over, going.path, tmp_path / "no run"):
        for number in ("1", "2", "10"):
            (run / "findings" / number).mkdir(parents=True)
    assert [path.name for path in remove_old_evidence(tmp_path, Retention(1, 0))] == ["2", "1"]
    assert [path.name for path in (over / "findings").iterdir()] == ["10"]
    assert (
        len(list((going.path / "findings").iterdir())) == len(list((tmp_path / "no run" / "findings").iterdir())) == 3
    )
    going.close()
    assert remove_old_evidence(tmp_path / "none", Retention(1, 0)) == []
