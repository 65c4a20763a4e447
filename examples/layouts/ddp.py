"""Data parallel with DDP: every rank holds everything. (A larger one: examples/gpt.)

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, batches_for, options
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    network = Network()
    with keepstep.join() as job:
        rank, world = dist.get_rank(), dist.get_world_size()
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        progress = Progress(args)
        torch.manual_seed(args.seed + rank)
        job.track(model=model, optimizer=optimizer)
        if args.checkpoints:
            job.checkpoint(args.checkpoints, every=5)
        batches = job.data(batches_for(samples, args, place=rank, places=world))

        for step in job.steps(total=args.steps):
            with step:
                progress.begin(step.number)
                inputs, targets = next(batches)
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.end(step.number, loss)


if __name__ == "__main__":
    main()
