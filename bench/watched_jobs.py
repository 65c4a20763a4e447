"""Jobs that a benchmark watches through their step logs: what each rank began when, and what a loss cost.

A step log has one line `time step rank pid` for each begin of a step. The end of a step is the moment the last rank
begins the next one; the interrupted step of a loss is the newest that any rank had begun.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["BIN", "ROOT", "Begin", "Episode", "Failed", "Job", "judged", "normal_step_s", "read"]

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WARM_STEPS = 5
LIMIT_S = 120.0


class Begin(NamedTuple):
    """One line of a step log: a rank begins a step."""

    time: float
    step: int
    rank: int
    pid: int


class Episode(NamedTuple):
    """One loss: the pause in seconds, and the finished steps that had to be computed again."""

    pause_s: float
    steps_lost: int


class Failed(RuntimeError):
    """A job did not do what the measurement needs."""


def read(log: Path) -> list[Begin]:
    """All whole lines of a step log, in the order of time."""
    if not log.is_file():
        return []
    lines = log.read_text().split("\n")[:-1]
    return sorted(Begin(float(t), int(s), int(r), int(p)) for t, s, r, p in (line.split() for line in lines))


def normal_step_s(begins: Sequence[Begin]) -> float:
    """Median time between the begins of consecutive steps of rank 0, the first few left out."""
    mine = [begin for begin in begins if begin.rank == 0 and begin.step >= WARM_STEPS]
    gaps = [b.time - a.time for a, b in zip(mine, mine[1:], strict=False) if (b.pid, b.step) == (a.pid, a.step + 1)]
    if not gaps:
        raise Failed("no normal step was seen")
    return statistics.median(gaps)


def full_again(begins: Sequence[Begin], step: int, *, since: float, world: int) -> list[Begin]:
    """Per rank its first begin of `step` after `since`; of all ranks, or none."""
    first: dict[int, Begin] = {}
    for begin in begins:
        if begin.time > since and begin.step == step:
            first.setdefault(begin.rank, begin)
    return list(first.values()) if len(first) == world else []


def judged(begins: Sequence[Begin], lost_at: float, *, world: int) -> Episode | None:
    """What the loss at `lost_at` cost; None while the job is not whole again."""
    before = [begin for begin in begins if begin.time <= lost_at]
    interrupted = max(begin.step for begin in before)
    whole = full_again(begins, interrupted + 1, since=lost_at, world=world)
    if not whole:
        return None
    members = {begin.pid for begin in whole}
    stayers = members & {begin.pid for begin in before}
    again = [begin.step for begin in begins if begin.time > lost_at and begin.pid in (stayers or members)]
    pause_s = max(begin.time for begin in whole) - lost_at - normal_step_s(before)
    return Episode(pause_s, max(0, interrupted - min(again)))


class Job:
    """A job that is being watched; leaving the block ends every process of it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = folder / "steps"
        self.output = folder / "output"
        surroundings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | surroundings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        pids = [*descendants(self.process.pid), *{begin.pid for begin in read(self.log)}]
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in pids:
            if str(self.log).encode() in command_line(pid):
                os.kill(pid, signal.SIGKILL)

    def until(self, found: Callable[[list[Begin]], object], *, what: str) -> list[Begin]:
        """The step log as soon as `found` is true of it. Raises Failed if the job ends or takes too long first."""
        give_up = time.monotonic() + LIMIT_S
        while True:
            ended = self.process.poll() is not None
            begins = read(self.log)
            if found(begins):
                return begins
            if ended or time.monotonic() > give_up:
                tail = self.output.read_text(errors="replace")[-1500:]
                raise Failed(f"{what}: {'job ended' if ended else f'not in {LIMIT_S:.0f} s'}\n{tail}")
            time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid`."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = [int(word) for word in listing.read_text().split()]
        except OSError:
            continue
        found += below + [deeper for child in below for deeper in descendants(child)]
    return found


def command_line(pid: int) -> bytes:
    """The command line of a process, empty if it is gone; to be sure that a pid is still ours."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
