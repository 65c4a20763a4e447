"""Tensor parallel with DTensor: every layer is cut over two ranks, and every pair is a replica of the others.

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/tensor_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, average_gradients, batches_for, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    model = Network()
    with keepstep.join() as job:
        replicas = dist.get_world_size() // 2
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicas", "tensor"))
        for block in model.blocks.values():
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        progress = Progress(args)
        replica = mesh.get_local_rank("replicas")
        torch.manual_seed(args.seed + replica)  # both ranks of a pair drop out the same activations
        job.track(model=model, optimizer=optimizer)
        if args.checkpoints:
            job.checkpoint(args.checkpoints, every=5)
        batches = job.data(batches_for(samples, args, place=replica, places=replicas))

        for step in job.steps(total=args.steps):
            with step:
                progress.begin(step.number)
                inputs, targets = next(batches)
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                average_gradients(model.parameters(), mesh.get_group("replicas"))
                optimizer.step()
                optimizer.zero_grad()
                progress.end(step.number, loss)


if __name__ == "__main__":
    main()
