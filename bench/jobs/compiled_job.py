"""A small compiled model under DDP that writes the time of every kept step; for bench/warm_up.py."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Block(torch.nn.Module):
    """A block of a transformer's size and shape, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first = torch.nn.Linear(width, 4 * width)
        self.second = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--until", required=True, help="go on behind step 10 when this file is there")
    parser.add_argument("--step-log", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with keepstep.join() as job:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block(256) for _ in range(4)))
        model = DistributedDataParallel(torch.compile(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        job.track(model=model, optimizer=optimizer)
        data = job.data([torch.rand(32, 256, generator=torch.Generator().manual_seed(n)) for n in range(64)])
        for step in job.steps(total=args.steps):
            with step:
                while step.number == 10 and not os.path.exists(args.until):
                    time.sleep(0.01)
                began = time.monotonic()
                model(next(data)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.kept:
                with open(args.step_log, "a") as log:
                    log.write(f"{step.number} {job.rank} {os.getpid()} {time.monotonic() - began}\n")


if __name__ == "__main__":
    main()
