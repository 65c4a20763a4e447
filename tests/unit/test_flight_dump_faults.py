"""Asking a process for a Flight Recorder dump through its pipe; a FIFO stands in for the one NCCL's monitor opens."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from keepstep.service import flight_dumps
from keepstep.service.environment import training_environment
from keepstep.service.flight_dumps import ask_for_dump, dump_environment, dump_of


def test_a_process_that_listens_is_asked_and_its_dump_read(tmp_path: Path) -> None:
    variables = dump_environment(tmp_path)
    pipe = Path(variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe")
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    assert not ask_for_dump(tmp_path, 3)  # nobody listens
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert ask_for_dump(tmp_path, 3) and os.read(reader, 10) == b"1\n"
    os.close(reader)
    assert dump_of(tmp_path, 3) == b""
    Path(variables["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_bytes(b"dump")
    assert dump_of(tmp_path, 3) == b"dump"


def test_no_pipe_no_dump(tmp_path: Path) -> None:
    assert not ask_for_dump(tmp_path, 0) and dump_of(tmp_path, 0) == b""


def test_what_a_person_has_set_is_kept(tmp_path: Path) -> None:
    made = training_environment(
        {"TORCH_FR_BUFFER_SIZE": "7"}, {}, run_id="j", own={}, master_port=None, unless_set=dump_environment(tmp_path)
    )
    assert made["TORCH_FR_BUFFER_SIZE"] == "7" and made["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(("installed", "old"), [("2.13.0+cpu", False), ("2.6.0", True), (None, False), ("dev", False)])
def test_torch_is_told_the_name_that_it_knows(
    installed: str | None, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer ones warn of the old name, in the log of every process."""

    def version(_: str) -> str:
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr(flight_dumps, "version", version)
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in dump_environment(tmp_path)) is old
