"""Pipeline parallel, interleaved 1F1B: two ranks with two stages each, and every pair a replica of the others.

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/interleaved.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import Network, Progress, Samples, average_gradients, batches_for, options
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

import keepstep


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    torch.manual_seed(args.seed)
    network = Network()
    with keepstep.join() as job:
        replicas = dist.get_world_size() // 2
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicas", "pipeline"))
        place, replica = mesh.get_local_rank("pipeline"), mesh.get_local_rank("replicas")
        parts = {number: network.part(number, of=4) for number in (place, place + 2)}
        stages = [
            PipelineStage(part, number, 4, torch.device("cpu"), group=mesh.get_group("pipeline"))
            for number, part in parts.items()
        ]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=mse_loss)
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        progress = Progress(args)
        torch.manual_seed(args.seed + dist.get_rank())
        job.track(model=stages, optimizer=optimizer)
        if args.checkpoints:
            job.checkpoint(args.checkpoints, every=5)
        batches = job.data(batches_for(samples, args, place=replica, places=replicas))

        for step in job.steps(total=args.steps):
            with step:
                progress.begin(step.number)
                inputs, targets = next(batches)
                losses: list[torch.Tensor] = []
                given = (inputs,) if place == 0 else ()
                schedule.step(*given, target=targets if place == 1 else None, losses=losses)
                average_gradients(parameters, mesh.get_group("replicas"))
                optimizer.step()
                optimizer.zero_grad()
                if place == 1:
                    progress.end(step.number, torch.stack(losses).mean())


if __name__ == "__main__":
    main()
