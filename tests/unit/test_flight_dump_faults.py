"""Asking a process for a Flight Recorder dump through its pipe; a FIFO stands in for the one NCCL's monitor opens."""

from __future__ import annotations

import os
from pathlib import Path

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
