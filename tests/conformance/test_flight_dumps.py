"""Dumps of the Flight Recorder of the installed torch, on Gloo, read as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.diagnosis.dump_verdict import diagnose_dumps
from keepstep.intake.flight_recorder import READER
from keepstep.intake.reading import head_of

SCRIPT = Path(__file__).with_name("dumping_rank.py")
WORLD = 4


def dumps_of_a_job(folder, absent):
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    arguments = [str(WORLD), str(folder), str(absent)]
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *arguments], env=environment) for rank in range(WORLD)
    ]
    codes = [process.wait(timeout=240) for process in ranks]
    assert codes == [0] * WORLD


def findings_of(folder, pattern):
    paths = sorted(folder.glob(pattern))
    assert all(READER.recognises(path, head_of(path)) for path in paths)
    return diagnose_dumps([item for path in paths for item in READER.read(path)])


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hanging")
    dumps_of_a_job(folder, absent=2)
    return folder


@pytest.mark.parametrize("pattern", ["dump_*", "json_*"])
def test_the_rank_that_does_not_call_is_named(hanging, pattern):
    (finding,) = findings_of(hanging, pattern)
    assert finding.kind == "noncommunication_hang"
    assert [[one.rank for one in some] for some in finding.suspects] == [[2]]
    assert finding.victims == (0, 1, 3)


def test_a_missing_dump_is_a_silent_rank(hanging, tmp_path):
    for rank in (0, 1, 3):
        shutil.copy(hanging / f"dump_{rank}", tmp_path)
    (finding,) = findings_of(tmp_path, "dump_*")
    assert (finding.kind, finding.suspects[0][0].rank) == ("reporter_silent", 2)


@pytest.mark.long
def test_a_job_that_goes_on_is_healthy(tmp_path):
    dumps_of_a_job(tmp_path, absent=-1)
    (finding,) = findings_of(tmp_path, "dump_*")
    assert finding.kind == "healthy"
