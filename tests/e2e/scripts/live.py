"""A light protected job that goes wrong as its arguments say: `--wrong RANK:STEP:HOW`.

HOW is shape, op or extra (a collective that the others do not call alike), or sleep, lock, loop, data (it stands still
there, once: a process that finds the marker goes on).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--pace", type=float, default=0.02, help="seconds of a step")
parser.add_argument("--size", type=int, default=8, help="elements of the largest message")
parser.add_argument("--wrong", default="-1:-1:none")
parser.add_argument("--marker", default="")
args = parser.parse_args()
wrong_rank, wrong_step, how = args.wrong.split(":")


def go_wrong(rank: int, step: int) -> bool:
    """Whether it is this process's turn; each marker is found once."""
    if (rank, step) != (int(wrong_rank), int(wrong_step)):
        return False
    if not args.marker:
        return True
    try:
        with Path(args.marker).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def stand_still() -> None:
    """Come to a stop in the chosen way."""
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if how == "loop":
        while True:
            pass
    time.sleep(600)


class Batches:
    """The same batches for everybody, from the start each time they are iterated."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for number in range(10**6):
            if how == "data" and go_wrong(self.rank, number):
                stand_still()
            yield torch.full((4, 8), number / 100.0)


with keepstep.join() as job:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    stream = job.data(Batches(job.rank))
    for step in job.steps(total=args.steps):
        with step:
            model(next(stream)).pow(2).mean().backward()
            time.sleep(args.pace)
            size = args.size
            if how in ("shape", "op", "extra", "sleep", "lock", "loop") and go_wrong(job.rank, step.number):
                if how == "op":
                    dist.broadcast(torch.ones(8), 0)
                elif how == "extra":
                    dist.all_reduce(torch.ones(3))
                elif how == "shape":
                    size += 1
                else:
                    stand_still()
            dist.all_reduce(torch.ones(size))
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
