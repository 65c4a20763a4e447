"""How long a job stands still when a rank is lost: keepstep against torchrun, four ranks, the example's model.

pause = from the signal to the end of the redone step, at full world size, minus one normal step. The end of a step
is the moment the last rank begins the next one. The interrupted step is the newest that any rank had begun. Both
scripts write the begin of every step; signals come from outside, at a random moment of a step. Baseline: plain DDP
on Gloo with a checkpoint every 10 steps, under torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it
torchrun 2.13 does not recover).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import Result, judge, options, ratios, report, rounds

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WORLD = 4
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


def keepstep(folder: Path, steps: int, *, faults: bool) -> list[str]:
    standbys = "1" if faults else "0"
    launch = ["run", "--nproc-per-node", str(WORLD), "--standby", standbys, "--run", str(folder / "run")]
    script = [str(ROOT / "examples" / "gpt" / "train.py"), "--steps", str(steps)]
    return [str(BIN / "keepstep"), *launch, *script, "--step-log", str(folder / "steps")]


def torchrun(folder: Path, steps: int, *, faults: bool) -> list[str]:
    launch = ["--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=5"]
    script = [str(ROOT / "bench" / "jobs" / "gpt_torchrun.py"), "--steps", str(steps)]
    saves = ["--checkpoint", str(folder / "checkpoint")] if faults else []
    return [str(BIN / "torchrun"), *launch, *script, *saves, "--step-log", str(folder / "steps")]


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


def full_again(begins: Sequence[Begin], step: int, *, since: float) -> list[Begin]:
    """Per rank its first begin of `step` after `since`; of all ranks, or none."""
    first: dict[int, Begin] = {}
    for begin in begins:
        if begin.time > since and begin.step == step:
            first.setdefault(begin.rank, begin)
    return list(first.values()) if len(first) == WORLD else []


def judged(begins: Sequence[Begin], lost_at: float) -> Episode | None:
    """What the loss at `lost_at` cost; None while the job is not whole again."""
    before = [begin for begin in begins if begin.time <= lost_at]
    interrupted = max(begin.step for begin in before)
    whole = full_again(begins, interrupted + 1, since=lost_at)
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


def lose_a_rank(launcher: Callable[..., list[str]], sent: signal.Signals, *, chance: random.Random) -> Episode:
    """Start a job, send the signal to a rank in mid-step, and wait until all ranks have redone the step."""
    at_step, victim = chance.randrange(14, 20), chance.randrange(1, WORLD)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        with Job(launcher(folder, at_step + 16, faults=True), folder) as job:
            begins = job.until(lambda seen: any(b.step >= at_step for b in seen), what="first steps")
            time.sleep(chance.random() * normal_step_s(begins))
            pid = next(begin.pid for begin in reversed(begins) if begin.rank == victim)
            lost_at = time.time()
            os.kill(pid, sent)
            begins = job.until(lambda seen: judged(seen, lost_at), what=f"recovery from {sent.name}")
    episode = judged(begins, lost_at)
    assert episode is not None
    return episode


def steady(launcher: Callable[..., list[str]], steps: int) -> float:
    """The normal step of an undisturbed job, in seconds."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        with Job(launcher(folder, steps, faults=False), folder) as job:
            begins = job.until(lambda seen: any(b.step == steps - 1 for b in seen), what="undisturbed steps")
            return normal_step_s(begins)


def measure(count: int, steps: int) -> list[Result]:
    """All cases, one after the other in every round; with no `steps` the two kills alone."""
    chance = random.Random(count)
    lost: list[float] = []

    def ours(sent: signal.Signals) -> float:
        episode = lose_a_rank(keepstep, sent, chance=chance)
        lost.append(episode.steps_lost)
        return episode.pause_s

    cases = {
        "keepstep killed": lambda: ours(signal.SIGKILL),
        "torchrun killed": lambda: lose_a_rank(torchrun, signal.SIGKILL, chance=chance).pause_s,
    }
    if steps:
        cases["keepstep frozen"] = lambda: ours(signal.SIGSTOP)
        cases["keepstep step"] = lambda: steady(keepstep, steps)
        cases["gloo step"] = lambda: steady(torchrun, steps)
    values = rounds(cases, count)
    shorter = ratios(values["torchrun killed"], values["keepstep killed"])
    results = [
        judge("pause after SIGKILL, keepstep", values["keepstep killed"], unit="s", at_most=0.3),
        judge("pause after SIGKILL, torchrun", values["torchrun killed"], unit="s"),
        judge("pause after SIGKILL, torchrun / keepstep", shorter, unit="x", at_least=10.0),
        judge("finished steps lost, keepstep", lost, unit="steps", at_most=0.0),
    ]
    if not steps:
        return results
    faster = ratios(values["gloo step"], values["keepstep step"])
    return [
        *results,
        judge("pause after SIGSTOP, keepstep", values["keepstep frozen"], unit="s", at_most=2.0),
        judge("steady step, DDP on Gloo / DDP on keepstep", faster, unit="x", at_least=1.0),
    ]


def main() -> int:
    parser = options("Pause after a loss, keepstep against torchrun.")
    parser.add_argument("--rounds", type=int, default=5, help="how often each case is run")
    args = parser.parse_args()
    try:
        results = measure(1 if args.quick else args.rounds, 0 if args.quick else 80)
    except Failed as failure:
        sys.stderr.write(f"bench/recovery.py: {failure}\n")
        return 1
    report("recovery", results, args.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
