"""HSDP: FSDP2 inside groups of two ranks, and every group a replica of the others.

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/hsdp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, batches_for, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    model = Network()
    with keepstep.join() as job:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards"))
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
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
