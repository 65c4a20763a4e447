"""A job with a state of some size (`--megabytes` on each rank, all alike) that steps until it is stopped."""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--megabytes", type=int, default=64)
parser.add_argument("--checkpoint", default="")
parser.add_argument("--steps", type=int, default=1_000_000)
args = parser.parse_args()
torch.set_num_threads(1)
with keepstep.join() as job:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ballast = torch.nn.Linear(1024, args.megabytes * 256, bias=False).requires_grad_(False)
    job.track(model=[model, ballast], optimizer=optimizer)
    if args.checkpoint:
        job.checkpoint(args.checkpoint, every=5)
    for step in job.steps(total=args.steps):
        with step:
            time.sleep(0.05)
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
