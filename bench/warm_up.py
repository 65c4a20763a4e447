"""What rehearsals are worth: a compiled model, two ranks, one of which is killed when its standby is warm.

Measured: the joiner's first step against the median of its later ones (at most 1.3), and the time from `Welcome` to
`Ready` with and without rehearsals, in the same round. The compiler's cache on disk is the machine's own: run the
benchmark once before to fill it, or point TORCHINDUCTOR_CACHE_DIR at an empty folder to measure without.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Result, judge, options, ratios, report, rounds

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
STEPS = 40


class Failed(RuntimeError):
    """A job did not do what the measurement needs."""


def records(run: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal."""
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def said(run: Path, kind: str) -> list[dict[str, Any]]:
    """All facts and orders of a kind, each with the wall-clock time of its record."""
    found = ((r.get("fact") or r.get("order") or {}, r) for r in records(run))
    return [{**message, "wall": record["wall"]} for message, record in found if message.get("kind") == kind]


def wait(process: subprocess.Popen[bytes], condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` is true. Raises Failed."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise Failed(f"never came: {what}")
        time.sleep(0.02)


def lose_one(*, sandbox: bool) -> tuple[float, float]:
    """Seconds from Welcome to Ready, and the joiner's first step over the median of its later ones."""
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as name:
        folder = Path(name)
        run, go, log = folder / "run", folder / "go", folder / "steps"
        (folder / "settings.toml").write_text(f"sandbox = {str(sandbox).lower()}\n")
        launch = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", "2", "--standby", "1"]
        launch += ["--on-hang", "observe", "--settings", str(folder / "settings.toml"), "--run", str(run)]
        script = [str(ROOT / "bench" / "jobs" / "compiled_job.py"), "--steps", str(STEPS)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*launch, *script, "--until", str(go), "--step-log", str(log)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _kill_when_warm(process, run, log=log, sandbox=sandbox)
            go.write_text("go")
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise Failed("the job did not end") from error
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        return _measured(run, log)


def _kill_when_warm(process: subprocess.Popen[bytes], run: Path, *, log: Path, sandbox: bool) -> None:
    def warm() -> bool:
        greeted = [fact for fact in said(run, "Hello") if fact["rank"] < 0]
        stepped = log.exists() and len(log.read_text().splitlines()) >= 20
        return stepped and bool(said(run, "WarmedUp") if sandbox else greeted)

    wait(process, warm, "a warm standby")
    os.kill(next(fact["pid"] for fact in said(run, "MemberStarted") if fact["rank"] == 1), signal.SIGKILL)


def _measured(run: Path, log: Path) -> tuple[float, float]:
    welcome = [order["wall"] for order in said(run, "Welcome") if order["joiner"]]
    ready = [fact["wall"] for fact in said(run, "Ready")]
    rows = [line.split() for line in log.read_text().splitlines()]
    joined = [float(seconds) for step, rank, _, seconds in rows if int(rank) == 1 and int(step) >= 10]
    if not welcome or not ready or len(joined) < STEPS - 10:
        raise Failed("the joiner did not join")
    return ready[-1] - welcome[-1], joined[0] / statistics.median(joined[1:])


def measure(count: int) -> list[Result]:
    """Both cases in every round."""
    first: list[float] = []

    def case(*, sandbox: bool) -> float:
        seconds, ratio = lose_one(sandbox=sandbox)
        if sandbox:
            first.append(ratio)
        return seconds

    values = rounds({"with": lambda: case(sandbox=True), "without": lambda: case(sandbox=False)}, count)
    return [
        judge("first step after the join / a later one, rehearsed", first, unit="x", at_most=1.3),
        judge("Welcome to Ready, rehearsed", values["with"], unit="s"),
        judge("Welcome to Ready, not rehearsed", values["without"], unit="s"),
        judge("not rehearsed / rehearsed", ratios(values["without"], values["with"]), unit="x"),
    ]


def main() -> int:
    parser = options("The first step after a join, and the way there, with and without rehearsals.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each case is run")
    args = parser.parse_args()
    try:
        results = measure(1 if args.quick else args.rounds)
    except Failed as failure:
        sys.stderr.write(f"bench/warm_up.py: {failure}\n")
        return 1
    report("warm_up", results, args.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
