"""Two runs of the same training: one loses a rank in mid-step, one does not. Ends with 0 if the weights are equal."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEEPSTEP = [str(Path(sys.executable).parent / "keepstep")]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("keepstep-runs/demo"), help="where the two runs are kept")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=2, help="the rank to kill")
    parser.add_argument("--at-step", type=int, default=30)
    return parser.parse_args()


def start(run: Path, steps: int) -> subprocess.Popen[bytes]:
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    launch = ["run", "--nproc-per-node", "4", "--standby", "1", "--run", str(run)]
    return subprocess.Popen([*KEEPSTEP, *launch, str(HERE / "train.py"), "--steps", str(steps)])


def wait_for(path: Path, job: subprocess.Popen[bytes], limit_s: float = 60.0) -> None:
    """Until the run directory is there. Exits with the job's code if it ended before."""
    give_up = time.monotonic() + limit_s
    while not path.is_file():
        if job.poll() is not None:
            sys.exit(job.returncode or 1)
        if time.monotonic() > give_up:
            job.terminate()
            sys.exit(f"the job did not write {path} in {limit_s:.0f} s")
        time.sleep(0.05)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def finish(job: subprocess.Popen[bytes], run: Path) -> dict:
    """The report of a run. Exits with the job's code if it failed."""
    if job.wait() != 0:
        sys.exit(job.returncode)
    return json.loads((run / "report.json").read_text())


def train(run: Path, args: argparse.Namespace, *, drill: bool) -> dict:
    job = start(run, args.steps)
    try:
        if drill:
            wait_for(run / "run.json", job)
            kill = ["drill", "kill", "--run", str(run), "--rank", str(args.rank), "--at-step", str(args.at_step)]
            subprocess.run([*KEEPSTEP, *kill], check=True)
        return finish(job, run)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


def main() -> int:
    args = options()
    say(f"training on 4 ranks with a standby; rank {args.rank} is killed in step {args.at_step}")
    disturbed = train(args.runs / "with-a-loss", args, drill=True)
    say("the same training, undisturbed")
    calm = train(args.runs / "undisturbed", args, drill=False)
    say("what happened in the first run")
    subprocess.run([*KEEPSTEP, "report", str(args.runs / "with-a-loss")], check=True)
    say("final weights (sha256)")
    print(f"with a loss  {disturbed['weights_sha256']}\nundisturbed  {calm['weights_sha256']}")
    if not disturbed["incidents"]:
        print("no incident was recorded: the drill did not happen")
        return 1
    if not calm["weights_sha256"] or disturbed["weights_sha256"] != calm["weights_sha256"]:
        print("the weights differ")
        return 1
    print("bit-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
