"""Train a byte-level GPT on the sources of the Python standard library, data parallel.

keepstep run --nproc-per-node 4 --standby 1 examples/gpt/train.py --steps 60

The lines that make the job survive a loss are those with `keepstep`, `job` or `step` in them. Under plain torchrun
the same script runs too, unprotected.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from model import GPT, Shape, Text, standard_library
from step_log import StepLog
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import keepstep


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A byte-level GPT on the Python standard library.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates to make")
    parser.add_argument("--batch-size", type=int, default=1, help="pieces of 64 bytes a rank and step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-log", default="", metavar="FILE", help="append the time of every step's begin")
    return parser.parse_args()


def batches_for(rank: int, text: Text, options: argparse.Namespace) -> DataLoader:
    sampler = DistributedSampler(text, dist.get_world_size(), rank, seed=options.seed)
    return DataLoader(text, batch_size=options.batch_size, sampler=sampler, drop_last=True)


def main() -> None:
    args = options()
    # What does not depend on the rank stands before join(): a standby has done it when it is needed.
    text = Text(standard_library(), block=Shape().block)
    torch.manual_seed(args.seed)
    network = GPT(Shape())
    with keepstep.join() as job:
        rank = dist.get_rank()
        log = StepLog(args.step_log, rank=rank)
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
        torch.manual_seed(args.seed + rank)  # every rank drops out other activations
        job.track(model=model, optimizer=optimizer)
        batches = job.data(batches_for(rank, text, args))

        for step in job.steps(total=args.steps):
            with step:
                log.begin(step.number)
                inputs, targets = next(batches)
                loss = model(inputs, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0 and (step.number + 1) % 10 == 0:
                    print(f"step {step.number + 1} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
