"""Without protection every member, neighbour of the dead one or not, gets an error that names it (G-8)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIZE = 6


def check_appears(files: list[Path], seconds: float) -> None:
    for _ in range(int(seconds / 0.02)):
        if all(file.exists() for file in files):
            return
        threading.Event().wait(0.02)
    assert [file.name for file in files if not file.exists()] == []


@pytest.mark.parametrize(("victim", "nodes"), [(5, "aaaaaa"), (2, "aabbcc")], ids=["shared", "mixed"])
def test_a_kill_is_an_error_everywhere(tmp_path: Path, victim: int, nodes: str) -> None:
    command = [sys.executable, str(HERE / "lossy.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(SIZE), nodes[rank], str(tmp_path)], stderr=subprocess.DEVNULL)
        for rank in range(SIZE)
    ]
    try:
        check_appears([tmp_path / f"ready.{rank}" for rank in range(SIZE)], 60)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        others = [rank for rank in range(SIZE) if rank != victim]
        check_appears([tmp_path / f"error.{rank}" for rank in others], 10)  # their time-out is an hour
        for rank in others:
            said = (tmp_path / f"error.{rank}").read_text()
            assert f"on rank {rank}" in said
            assert "group" in said
            assert f"rank {victim}" in said
            assert "->" in said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
