"""Pipeline parallel, schedule 1F1B: four stages, or two where there are two ranks.

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/pipeline.py --checkpoints checkpoints
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, average_gradients, batches_for, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    network = Network()
    with keepstep.join() as job:
        stages = min(4, dist.get_world_size())
        replicas = dist.get_world_size() // stages
        mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("replicas", "stages"))
        number, replica = mesh.get_local_rank("stages"), mesh.get_local_rank("replicas")
        part = network.part(number, of=stages)
        stage = PipelineStage(part, number, stages, torch.device("cpu"), group=mesh.get_group("stages"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
        progress = Progress(args)
        torch.manual_seed(args.seed + dist.get_rank())
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
                average_gradients(part.parameters(), mesh.get_group("replicas"))
                optimizer.step()
                optimizer.zero_grad()
                if stage.is_last:
                    progress.end(step.number, torch.stack(losses).mean())


if __name__ == "__main__":
    main()
