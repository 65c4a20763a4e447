"""How long a job stands still when a rank is lost: keepstep against torchrun, four ranks, the example's model.

pause = from the signal to the end of the redone step, at full world size, minus one normal step. The end of a step
is the moment the last rank begins the next one. The interrupted step is the newest that any rank had begun. Both
scripts write the begin of every step; signals come from outside, at a random moment of a step. Baseline: plain DDP
on Gloo with a checkpoint every 10 steps, under torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it
torchrun 2.13 does not recover). `--layouts` measures every layout of the examples instead (recovery_layouts.py).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Result, judge, options, ratios, report, rounds
from recovery_layouts import measure_layouts
from watched_jobs import BIN, ROOT, Episode, Failed, Job, judged, normal_step_s

WORLD = 4


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
            begins = job.until(lambda seen: judged(seen, lost_at, world=WORLD), what=f"recovery from {sent.name}")
    episode = judged(begins, lost_at, world=WORLD)
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
    parser.add_argument("--layouts", action="store_true", help="every layout of the examples, without torchrun")
    parser.add_argument("--planned", action="store_true", help="with --layouts: a planned move of each, too")
    args = parser.parse_args()
    try:
        if args.layouts:
            few = {"layouts": ("hsdp", "pipeline")} if args.quick else {}
            results = measure_layouts(1 if args.quick else args.rounds, planned=args.planned, **few)
        else:
            results = measure(1 if args.quick else args.rounds, 0 if args.quick else 80)
    except Failed as failure:
        sys.stderr.write(f"bench/recovery.py: {failure}\n")
        return 1
    report("recovery_layouts" if args.layouts else "recovery", results, args.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
