"""Each rank draws its inputs from a generator of its own, which is tracked with a count that all have alike.

`--large N` tracks N bytes more, which differ by rank; `--norm` has a BatchNorm whose buffers nobody makes alike.
Stops once at a chosen point to be killed there.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from holding import hold
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Noise:
    """Numbers of this rank."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Count:
    """Goes up behind every update, as a schedule does."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


class Large:
    """More than goes with a rank's random numbers."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self.data = torch.full((nbytes,), rank, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data = state["data"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--large", type=int, default=0)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--marker", default="")
    parser.add_argument("--point", default="", help="inside: before the update; behind: after it")
    parser.add_argument("--at", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), *[torch.nn.BatchNorm1d(8)] * args.norm)
    with keepstep.join() as job:
        rank = dist.get_rank()
        wrapped = DistributedDataParallel(model, broadcast_buffers=not args.norm)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        noise, count = Noise(rank), Count()
        extra: dict[str, Any] = {"noise": noise, "count": count}
        if args.large:
            extra["large"] = Large(rank, args.large)
        job.track(model=wrapped, optimizer=optimizer, extra=extra)
        if args.checkpoint:
            job.checkpoint(args.checkpoint, every=5)
        for step in job.steps(total=args.steps):
            with step:
                here = args.marker and rank == 1 and step.number == args.at
                inputs = torch.randn(4, 8, generator=noise.generator)
                if here and args.point == "inside":
                    hold(args.marker)
                (wrapped(inputs) * (1 + count.updates)).tanh().pow(2).mean().backward()
                optimizer.step()
                if here and args.point == "behind":
                    hold(args.marker)
                count.updates += 1
                optimizer.zero_grad()
        draw = torch.rand(1, generator=noise.generator).item()
        seen = sum(float(buffer.sum()) for buffer in model.buffers())
        print(f"rank {rank} ends with {count.updates} updates, draws {draw:.6f} and has seen {seen:.6f}", flush=True)


if __name__ == "__main__":
    main()
