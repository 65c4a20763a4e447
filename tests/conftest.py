"""For all tests: no test leaves a process behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The standard library's own servants of multiprocessing, which live as long as the test process.
SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def children() -> set[int]:
    """Pids of this process's living children, servants and zombies left out."""
    found = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread ended meanwhile
            continue
        for pid in pids:
            if lives(Path("/proc") / pid):
                found.add(int(pid))
    return found


def lives(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
        command = (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return state != "Z" and not any(servant in command for servant in SERVANTS)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """G-16 for the tests themselves: every process that a test started has ended when the test has."""
    before = children()
    yield
    left = children() - before
    for pid in left:
        os.kill(pid, 9)
    assert not left, f"left running: {sorted(left)}"
