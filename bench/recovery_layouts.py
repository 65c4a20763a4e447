"""Every layout of the examples: a rank killed, and a rank moved. Run as `bench/recovery.py --layouts`.

A loss: from the signal to the moment when all ranks have done the interrupted step again, minus a normal step; the
finished steps that were computed again. A planned move: the longest time between two steps that a stayer begins,
from the command on until the joiner has taken part in a step, minus a normal step. Steps are short, so pauses are
seen; the victim is another rank in every round.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from harness import Result, judge
from watched_jobs import BIN, ROOT, Begin, Episode, Failed, Job, judged, normal_step_s

__all__ = ["LAYOUTS", "measure_layouts"]

LAYOUTS = {
    "ddp": 4,
    "fsdp2": 4,
    "hsdp": 4,
    "tensor_parallel": 4,
    "pipeline": 4,
    "interleaved": 4,
    "expert_parallel": 4,
    "tp_pp_dp": 8,
}
"""Ranks of each layout. Checkpoints are written every 5 steps; only what has no replica goes back to one."""

_AT_STEP = 12
_STEPS = 40
_PACE_S = "0.05"


def command(layout: str, folder: Path) -> list[str]:
    launch = ["run", "--nproc-per-node", str(LAYOUTS[layout]), "--standby", "1", "--run", str(folder / "run")]
    script = [str(ROOT / "examples" / "layouts" / f"{layout}.py"), "--steps", str(_STEPS), "--pace", _PACE_S]
    files = ["--checkpoints", str(folder / "checkpoints"), "--step-log", str(folder / "steps")]
    return [str(BIN / "keepstep"), *launch, *script, *files]


def lose(layout: str, *, chance: random.Random) -> Episode:
    """One rank killed at a random moment of a step."""
    victim = chance.randrange(LAYOUTS[layout])
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        with Job(command(layout, folder), folder) as job:
            begins = job.until(lambda seen: any(b.step >= _AT_STEP for b in seen), what=f"{layout}: first steps")
            time.sleep(chance.random() * normal_step_s(begins))
            pid = next(begin.pid for begin in reversed(begins) if begin.rank == victim)
            lost_at = time.time()
            os.kill(pid, signal.SIGKILL)
            world = LAYOUTS[layout]
            begins = job.until(lambda seen: judged(seen, lost_at, world=world), what=f"{layout}: recovery")
    episode = judged(begins, lost_at, world=world)
    assert episode is not None
    return episode


def move(layout: str, *, chance: random.Random) -> Episode:
    """One rank moved to a standby while all live."""
    mover = chance.randrange(LAYOUTS[layout])
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        with Job(command(layout, folder), folder) as job:
            job.until(lambda seen: any(b.step >= _AT_STEP for b in seen), what=f"{layout}: first steps")
            asked_at = time.time()
            asked = [str(BIN / "keepstep"), "move", "--run", str(folder / "run"), "--rank", str(mover)]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Failed(f"{layout}: keepstep move: {done.stderr.strip()}")
            begins = job.until(lambda seen: taken_over(seen, mover), what=f"{layout}: move of rank {mover}")
    return Episode(longest_gap_s(begins, mover, since=asked_at) - normal_step_s(begins), 0)


def taken_over(begins: list[Begin], rank: int) -> bool:
    """Whether another process than the first one has begun two steps as `rank`."""
    pids = [begin.pid for begin in begins if begin.rank == rank]
    return sum(pid != pids[0] for pid in pids) >= 2


def longest_gap_s(begins: list[Begin], mover: int, *, since: float) -> float:
    """The longest time between two begins of one stayer, after `since`."""
    gaps = [0.0]
    for rank in {begin.rank for begin in begins} - {mover}:
        times = [begin.time for begin in begins if begin.rank == rank and begin.time >= since]
        gaps += [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return max(gaps)


def measure_layouts(count: int, *, planned: bool, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> list[Result]:
    """`count` losses (and, if `planned`, moves) of each layout, round by round. Raises Failed."""
    chance = random.Random(count)
    lost: dict[str, list[Episode]] = {layout: [] for layout in layouts}
    moved: dict[str, list[Episode]] = {layout: [] for layout in layouts}
    for _ in range(count):
        for layout in layouts:
            lost[layout].append(lose(layout, chance=chance))
            if planned:
                moved[layout].append(move(layout, chance=chance))
    results = []
    for layout in layouts:
        results.append(judge(f"{layout}: pause after SIGKILL", [one.pause_s for one in lost[layout]], unit="s"))
        results.append(judge(f"{layout}: finished steps lost", [one.steps_lost for one in lost[layout]], unit="steps"))
        if planned:
            results.append(judge(f"{layout}: pause of a move", [one.pause_s for one in moved[layout]], unit="s"))
    return results
