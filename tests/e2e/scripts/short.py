"""A small protected job that prints its loss; with `--nan` it is none in step 3. Writes checkpoints if told where."""

from __future__ import annotations

import argparse

import torch

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--nan", action="store_true")
parser.add_argument("--checkpoints", default="")
args = parser.parse_args()
with keepstep.join() as job:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    if args.checkpoints:
        job.checkpoint(args.checkpoints, every=2)
    for step in job.steps(total=args.steps):
        with step:
            loss = model(torch.ones(2, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(
                f"step {step.number} loss {float('nan') if args.nan and step.number == 3 else loss.item()}", flush=True
            )
