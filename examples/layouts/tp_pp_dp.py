"""Eight ranks: tensor parallel 2 x pipeline 2 x data parallel 2.

keepstep run --nproc-per-node 8 --standby 1 examples/layouts/tp_pp_dp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, average_gradients, batches_for, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    network = Network()
    with keepstep.join() as job:
        replicas = dist.get_world_size() // 4
        mesh = init_device_mesh("cpu", (replicas, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
        number, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
        part = network.part(number, of=2)
        for block in part.blocks.values():
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, foreach=False)
        progress = Progress(args)
        torch.manual_seed(args.seed + 2 * replica + number)  # both ranks of a pair drop out the same activations
        job.track(model=stage, optimizer=optimizer)
        if args.checkpoints:
            job.checkpoint(args.checkpoints, every=5)
        batches = job.data(batches_for(samples, args, place=replica, places=replicas))

        for step in job.steps(total=args.steps):
            with step:
                progress.begin(step.number)
                inputs, targets = next(batches)
                losses: list[torch.Tensor] = []
                given = (inputs,) if stage.is_first else ()
                schedule.step(*given, target=targets if stage.is_last else None, losses=losses)
                average_gradients(part.parameters(), mesh.get_group("data"))
                optimizer.step()
                optimizer.zero_grad()
                if stage.is_last:
                    progress.end(step.number, torch.stack(losses).mean())


if __name__ == "__main__":
    main()
