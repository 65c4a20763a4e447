"""A job with two pipeline stages, tensor pairs and replicas, made by hand; `--fault NAME` plants one mistake in it.

Ranks are numbered (stage, replica, part). Without a fault it runs on any world that is a multiple of 4.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--points", type=int, default=4096)
args = parser.parse_args()
fault = args.fault
if fault == "rank-before-join":
    torch.manual_seed(int(os.environ.get("RANK", "0")))


def groups_of(rank: int, world: int):
    """The group of my tensor pair, the one of my replicas, and the rank at the same place of the other stage."""
    half = world // 2
    pairs = [[first, first + 1] for first in range(0, world, 2)]
    replicas = [[stage * half + part + 2 * i for i in range(half // 2)] for stage in (0, 1) for part in (0, 1)]
    if fault == "group-order" and rank >= half:
        pairs.reverse()
    if fault == "group-ranks" and rank == world - 1:
        replicas[-1] = replicas[-1][:-1]
    made = [(ranks, dist.new_group(ranks)) for ranks in pairs]
    if not (fault == "group-not-made" and rank == 0):
        made += [(ranks, dist.new_group(ranks)) for ranks in replicas]
    own = [group for ranks, group in made if rank in ranks]
    return own[0], own[-1], (rank + half) % world


def main() -> None:
    with keepstep.join() as job:
        rank, world = dist.get_rank(), dist.get_world_size()
        if fault == "mesh":
            shape = (2, world // 2) if rank else (world // 2, 2)
            dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        if args.width % world:
            raise ValueError(f"width {args.width} is not divisible by {world} ranks")
        pair, replicas, other = groups_of(rank, world)
        first_stage = rank < world // 2
        wide = args.width + (fault == "width" and rank == 1)
        model = torch.nn.Linear(args.width, wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.track(model=model, optimizer=optimizer, role=f"stage {int(first_stage)}")
        data = TensorDataset(torch.randn(args.points, args.width))
        loader = DataLoader(data, batch_size=4, drop_last=True)
        batches = job.data(iter(loader) if fault == "one-pass" else loader)
        for step in job.steps(total=args.steps):
            with step:
                if fault == "hang" and rank == world - 1:
                    time.sleep(600)
                if fault == "assert" and rank == 1:
                    assert args.width % 3 == 0
                if first_stage:
                    (x,) = next(batches)
                else:
                    x = torch.zeros(4, args.width)
                    if not (fault == "no-receive" and step.number == 1):
                        dist.recv(x if fault != "receive-size" else torch.zeros(4, args.width - 1), other)
                y = model(x)
                y.pow(2).mean().backward()
                if first_stage and not (fault == "no-send" and rank == 0):
                    dist.send(y.detach()[:, : args.width].contiguous(), other)
                part = y.detach()[0].clone()
                if fault == "reduction" and rank % 2:
                    dist.all_reduce(part, op=dist.ReduceOp.MAX, group=pair)
                elif fault == "dtype" and rank == 2:
                    dist.all_reduce(part.double(), group=pair)
                elif fault == "op" and rank == 3:
                    dist.broadcast(part, rank - 1, group=pair)
                else:
                    dist.all_reduce(part, group=pair)
                if fault == "conditional" and rank == 0:
                    dist.all_reduce(torch.ones(3))
                crossed = fault == "crossed" and rank == 0
                for group in (replicas, None) if crossed else (None, replicas):
                    dist.all_reduce(model.weight.grad if group else torch.ones(1), group=group)
                if fault == "shape" and step.number == 1 and rank == world - 1:
                    dist.all_reduce(torch.ones(5))
                else:
                    dist.all_reduce(torch.ones(4))
                if fault == "reads-memory" and rank == 0:
                    kept = [torch.ones(1 << 27) for _ in range(64)]
                    assert kept
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
