"""Starting the command line from tests and looking at what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN, MEMBER = str(SCRIPTS / "plain.py"), str(SCRIPTS / "member.py")
LIMIT_S = 60.0


def keepstep(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "keepstep.cli", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def started(*words: object, cwd: Path) -> subprocess.Popen[str]:
    """Start one command; what the ranks print is not kept, so that no pipe can fill up."""
    command = [sys.executable, "-m", "keepstep.cli", *map(str, words)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something has become true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single line a mistake must give, without a traceback."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.returncode != 0
    return lines[0]


def pids_of(directory: Path, stem: str, world: int) -> list[int]:
    """The pids that plain.py wrote with --child."""
    return [int(word) for rank in range(world) for word in (directory / f"{stem}.{rank}").read_text().split()]


def children_written(directory: Path, stem: str, world: int) -> bool:
    return all(
        (directory / f"{stem}.{rank}").is_file() and os.stat(directory / f"{stem}.{rank}").st_size
        for rank in range(world)
    )
