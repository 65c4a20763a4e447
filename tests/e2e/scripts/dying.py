"""Runs another script, whose processes end themselves at chosen places: `dying.py [options] script [arguments]`.

`--die RANK:STEP:CALL` sends SIGKILL to the process that holds RANK when it makes the CALL-th communication call of
STEP (from 0; "update": in the optimizer step, behind the agreement). Each happens once. `--weights` is a directory in
which every rank leaves the hash of its final weights. `--control` is explained in phases.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from phases import stop_at_phases

from keepstep.training.collectives import KeepstepGroup
from keepstep.training.user_job import Job


class Deaths:
    """Where this process is, and where it has to die."""

    def __init__(self, places: list[str], marker: str, pace_file: str) -> None:
        self.places = places
        self.marker = marker
        self.pace_file = pace_file
        self.step = -1
        self.calls = 0

    def at(self, place: str) -> None:
        here = f"{dist.get_rank()}:{self.step}:{place}"
        if here not in self.places:
            return
        try:
            Path(f"{self.marker}.{here.replace(':', '-')}").open("x").close()
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def calling(self) -> None:
        if self.step >= 0:
            if self.pace_file and not self.calls:
                time.sleep(float(Path(self.pace_file).read_text() or 0))
            self.at(str(self.calls))
            self.calls += 1

    def steps(self, of, job: Job, total: int):
        for optimizer in job._tracked.optimizers.values():
            optimizer.register_step_pre_hook(lambda *_: self.at("update"))
        for step in of(job, total):
            self.step, self.calls = step.number, 0
            yield step
            self.step = -1


@contextlib.contextmanager
def watched(deaths: Deaths, weights: str):
    submit, steps, leave = KeepstepGroup._submit, Job.steps, Job.__exit__

    def counted(group, *args, **kwargs):
        deaths.calling()
        return submit(group, *args, **kwargs)

    def left(job, kind, *rest):
        if weights and kind is None:
            (Path(weights) / f"rank-{job.rank}").write_text(job._tracked.weights_sha256())
        return leave(job, kind, *rest)

    KeepstepGroup._submit = counted
    Job.steps = lambda job, total: deaths.steps(steps, job, total)
    Job.__exit__ = left
    try:
        yield
    finally:
        KeepstepGroup._submit, Job.steps, Job.__exit__ = submit, steps, leave


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--marker", default="")
    parser.add_argument("--weights", default="")
    parser.add_argument("--control", default="")
    parser.add_argument("--pace-file", default="", help="seconds to wait in every step, read again in each")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.control:
        stop_at_phases(Path(args.control))
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).parent))
    with watched(Deaths(args.die, args.marker, args.pace_file), args.weights):
        runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
