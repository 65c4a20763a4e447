"""What a controller leaves for the next one, and who may take it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_job_shell import SPEC
from test_run_directory import FACTS

from keepstep import __version__
from keepstep.errors import UsageError, VersionMismatch
from keepstep.service.job_host import JobPlan, LeftJob
from keepstep.service.left_job import keep_left, read_left
from keepstep.service.remote_controller import take_over
from keepstep.service.run_directory import RunDirectory
from keepstep.service.settings import Settings

LEFT = LeftJob(JobPlan("job7", "s.py", (), 1, Settings()), SPEC, "127.0.0.1", 0, "")


def left_in(path: Path, version: str, left: LeftJob | None = LEFT) -> Path:
    directory = RunDirectory(path, reserve_bytes=0)
    if left is not None:
        keep_left(directory, left)
    directory.publish(msgspec.structs.replace(FACTS, keepstep_version=version))
    directory.close()
    return path


def test_the_next_controller_reads_it_whole(tmp_path):
    assert read_left(left_in(tmp_path, __version__)) == LEFT
    assert (tmp_path / "state" / "controller.json").stat().st_mode & 0o777 == 0o600


def test_another_version_refuses_before_anybody_hears_of_it(tmp_path):
    """Agents that reached it would be refused and end their processes."""
    before = sorted(left_in(tmp_path, "0.0.9").rglob("*"))
    with pytest.raises(VersionMismatch, match=rf"job7 was begun by keepstep 0\.0\.9, this is {__version__}"):
        take_over(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_without_a_controller_of_its_own_cannot_be_taken(tmp_path):
    with pytest.raises(UsageError, match="no controller that could be replaced"):
        read_left(left_in(tmp_path, "0.0.9", None))
