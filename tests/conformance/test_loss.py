"""Without protection every member, neighbour of the dead one or not, gets an error that names it (G-12)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("lossy.py")


def check_appears(files: list[Path], seconds: float) -> None:
    for _ in range(int(seconds / 0.02)):
        if all(file.exists() for file in files):
            return
        threading.Event().wait(0.02)
    assert [file.name for file in files if not file.exists()] == []


@pytest.mark.parametrize(
    ("victim", "nodes", "way"),
    [(5, "aaaaaa", "call"), (2, "aabbcc", "call"), (3, "aabb", "backward")],
    ids=["shared", "mixed", "backward"],
)
def test_a_kill_is_an_error_everywhere(tmp_path: Path, victim: int, nodes: str, way: str) -> None:
    ready = [tmp_path / f"ready.{rank}" for rank in range(len(nodes))]
    job = subprocess.Popen([sys.executable, str(SCRIPT), nodes, str(tmp_path), way], stderr=subprocess.DEVNULL)
    try:
        check_appears(ready, 90)
        os.kill(int(ready[victim].read_text()), signal.SIGKILL)
        others = [rank for rank in range(len(nodes)) if rank != victim]
        check_appears([tmp_path / f"error.{rank}" for rank in others], 15)  # their time-out is an hour
        for rank in others:
            said = (tmp_path / f"error.{rank}").read_text()
            assert f"on rank {rank}" in said
            assert "group" in said
            assert f"rank {victim}" in said
            assert "->" in said
        job.wait(30)
    finally:
        for file in ready:
            if file.exists() and job.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
        job.kill()
        job.wait()
