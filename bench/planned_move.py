"""What a planned move costs: the GPT example on 4 and 8 ranks, a rank moved to a warm standby again and again.

Every move stands between two undisturbed stretches of the same job. Its cost is the time from the step in which it was
asked for to the end of the joiner's first step, above as many normal steps; it holds the slow-down by the preparation
(set-up of the joiner, copy of the state, updates that it follows) and the pause. The pause is what the step boundary of
the commit took above a normal step. Kept is the share of throughput left with one move every 30 normal steps, which is
10 minutes to a step of 20 s. The start of the process that replaces the used standby comes after that, and is measured
by itself. With `--no-gaps` state does not wait for gaps between collectives in every second job.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import Result, judge, options, report
from watched_jobs import BIN, ROOT, Begin, Failed, Job, read

from keepstep.records.moves import MoveRequest
from keepstep.service.control_socket import ask_move

EVERY_STEPS = 30
STRETCH = 12
LIMIT_S = 600.0
LOOK_EVERY_S = 0.25
PARTS = ("vote_s", "last_update_s", "check_s", "copy_s", "own_state_s", "install_s")


class Cost(NamedTuple):
    """One move. Seconds, but for `kept` (share); `copied` (in the pause) and `followed` (beside training) are bytes."""

    step_s: float
    lost_s: float
    pause_s: float
    kept: float
    parts: dict[str, float]
    copied: float
    followed: float
    start_s: float
    start_lost_s: float


class Moves:
    """A job with warm standbys, and what happened in it."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job

    def records(self, kind: str) -> list[dict]:
        """Records, facts or orders of that kind in the journal."""
        journal = self.folder / "run" / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
        return [{**one, **(one.get("fact") or one.get("order") or {})} for one in found]

    def until(self, found: Callable[[], object], what: str) -> None:
        """Looks now and then, so that looking costs the job little. Raises Failed."""
        give_up = time.monotonic() + LIMIT_S
        while not found():
            if self.job.process.poll() is not None or time.monotonic() > give_up:
                raise Failed(f"{what}: not seen\n{self.job.output.read_text(errors='replace')[-1500:]}")
            time.sleep(LOOK_EVERY_S)

    def warm(self) -> int:
        """Standbys that are warm and unused, or were used: how many said hello."""
        return sum(fact["rank"] < 0 for fact in self.records("Hello"))

    def newest(self) -> int:
        """The newest step that rank 0 has begun."""
        return max((begin.step for begin in read(self.job.log) if begin.rank == 0), default=-1)

    def stretch(self) -> None:
        """Some undisturbed steps."""
        goal = self.newest() + STRETCH
        self.until(lambda: self.newest() >= goal, "undisturbed steps")


def begun(begins: Sequence[Begin], world: int) -> dict[int, float]:
    """When each step had begun on all ranks."""
    steps: dict[int, dict[int, float]] = {}
    for begin in begins:
        steps.setdefault(begin.step, {}).setdefault(begin.rank, begin.time)
    return {step: max(times.values()) for step, times in steps.items() if len(times) == world}


def normal_s(times: dict[int, float], steps: range) -> float:
    """The median step among `steps`."""
    return statistics.median(times[step + 1] - times[step] for step in steps if step in times and step + 1 in times)


def move(moves: Moves, world: int, *, rank: int) -> Cost:
    """Move `rank`, between two undisturbed stretches."""
    moves.stretch()
    asked_at, warm, before = moves.newest(), moves.warm(), len(moves.records("MoveRecord"))
    started = time.time()
    ask_move(moves.folder / "run", MoveRequest((rank,), wait=False))
    moves.until(lambda: len(moves.records("MoveRecord")) > before, "the end of a move")
    record = moves.records("MoveRecord")[-1]
    if record["outcome"] != "made":
        raise Failed(f"a move was {record['outcome']}: {record['why']}")
    moves.until(lambda: moves.warm() > warm, "a new standby")
    hello = max(fact["wall"] for fact in moves.records("Hello"))
    ready = moves.newest()
    moves.stretch()
    times = begun(read(moves.job.log), world)
    step_s = statistics.median(
        [normal_s(times, range(asked_at - STRETCH, asked_at - 1)), normal_s(times, range(ready + 2, ready + STRETCH))]
    )
    commit = record["step"]
    first, last = max(step for step in times if times[step] <= started), commit + 1
    lost_s = times[last] - times[first] - (last - first) * step_s
    pause_s = times[commit] - times[commit - 1] - step_s
    settled = min((step for step in times if times[step] > hello), default=last)
    return Cost(
        step_s,
        lost_s,
        pause_s,
        EVERY_STEPS * step_s / (EVERY_STEPS * step_s + max(lost_s, 0.0)),
        {name: record["pause"].get(name, 0.0) for name in PARTS},
        record["pause"].get("bytes", 0.0),
        float(record["bytes_moved"]),
        hello - times[last],
        times[settled] - times[last] - (settled - last) * step_s,
    )


def run(world: int, count: int, *, batch: int, gaps: bool) -> list[Cost]:
    """One job in which `count` ranks are moved, one after the other."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        launch = ["run", "--nproc-per-node", str(world), "--standby", "2", "--run", str(folder / "run")]
        script = [str(ROOT / "bench" / "jobs" / "gpt_moves.py"), *([] if gaps else ["--no-gaps"])]
        steps = ["--steps", "100000", "--batch-size", str(batch), "--step-log", str(folder / "steps")]
        with Job([str(BIN / "keepstep"), *launch, *script, *steps], folder) as job:
            moves = Moves(folder, job)
            moves.until(lambda: moves.newest() >= STRETCH and moves.warm() >= 2, "first steps and warm standbys")
            return [move(moves, world, rank=rank) for rank in itertools.islice(itertools.cycle(range(world)), count)]


def results_of(label: str, costs: Sequence[Cost], *, target: float | None) -> list[Result]:
    """The lines of one case."""

    def line(name: str, values: Sequence[float], unit: str) -> Result:
        return judge(f"{label}: {name}", values, unit=unit)

    kept = [100 * cost.kept for cost in costs]
    return [
        judge(f"{label}: throughput kept, a move every {EVERY_STEPS} steps", kept, unit="%", at_least=target),
        line("normal step", [cost.step_s for cost in costs], "s"),
        line("cost of a move in all", [cost.lost_s for cost in costs], "s"),
        line("pause", [cost.pause_s for cost in costs], "s"),
        line("slow-down by preparation", [cost.lost_s - cost.pause_s for cost in costs], "s"),
        *(line(f"in the pause: {part[:-2]}", [cost.parts[part] for cost in costs], "s") for part in PARTS),
        line("copied in the pause", [cost.copied for cost in costs], "B"),
        line("copied beside training", [cost.followed / 1e6 for cost in costs], "MB"),
        line("apart: start of a new standby", [cost.start_s for cost in costs], "s"),
        line("apart: slow-down by that start", [cost.start_lost_s for cost in costs], "s"),
    ]


def main() -> int:
    parser = options("What a planned move costs.")
    parser.add_argument("--moves", type=int, default=8, help="moves in a job")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of 64 bytes a rank and step")
    parser.add_argument("--no-gaps", action="store_true", help="also without waiting for gaps between collectives")
    args = parser.parse_args()
    worlds = (4,) if args.quick else (4, 8)
    found: list[Result] = []
    try:
        for world in worlds:
            costs = run(world, 1 if args.quick else args.moves, batch=args.batch_size, gaps=True)
            found += results_of(f"{world} ranks", costs, target=97.0)
            if args.no_gaps:
                other = run(world, 1 if args.quick else args.moves, batch=args.batch_size, gaps=False)
                found += results_of(f"{world} ranks, gaps not waited for", other, target=None)
    except Failed as failure:
        sys.stderr.write(f"bench/planned_move.py: {failure}\n")
        return 1
    report("planned_move", found, args.format)
    return 0 if all(result.met for result in found) else 1


if __name__ == "__main__":
    sys.exit(main())
