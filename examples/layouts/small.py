"""What the layouts share: a small network that learns a fixed function, its data, options and gradient averaging."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

__all__ = ["WIDTH", "Block", "Network", "Progress", "Samples", "average_gradients", "batches_for", "options"]

WIDTH = 32
"""Numbers in a sample, and in everything that goes from block to block."""


def options(description: str) -> argparse.Namespace:
    """The command line, equal for all layouts."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer updates to make")
    parser.add_argument("--batch-size", type=int, default=16, help="samples a data-parallel rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="seconds to wait in every step")
    parser.add_argument("--checkpoints", default="", metavar="DIR", help="write a checkpoint after every 5 steps")
    parser.add_argument("--step-log", default="", metavar="FILE", help="append the time of every step's begin")
    return parser.parse_args()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random points, and as targets what a fixed function makes of them."""

    def __init__(self, count: int = 4096) -> None:
        self.inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
        self.targets = torch.sin(self.inputs.cumsum(dim=1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Block(nn.Module):
    """A two-layer network beside the straight way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


class Network(nn.Module):
    """Blocks in a row. `part(i, of=n)` is a module of the i-th n-th of them, for pipelines."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block{number}": Block() for number in range(blocks)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x

    def part(self, number: int, *, of: int) -> Network:
        names = list(self.blocks)
        each = len(names) // of
        kept = names[number * each : (number + 1) * each]
        part = Network(0)
        part.blocks = nn.ModuleDict({name: self.blocks[name] for name in kept})
        return part


def batches_for(samples: Samples, args: argparse.Namespace, *, place: int, places: int) -> DataLoader:
    """What the data-parallel rank `place` of `places` reads; ranks that share a batch give the same place."""
    sampler = DistributedSampler(samples, places, place, seed=args.seed)
    return DataLoader(samples, batch_size=args.batch_size, sampler=sampler, drop_last=True)


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Data parallelism by hand: every gradient becomes its mean over `group`."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)


class Progress:
    """What a rank tells of its steps: `time step rank pid` at each begin into a file, and the loss now and then."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file = os.open(args.step_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if args.step_log else -1
        self.rank = dist.get_rank()
        self.pace = args.pace

    def begin(self, step: int) -> None:
        if self.file >= 0:
            os.write(self.file, f"{time.time():.6f} {step} {self.rank} {os.getpid()}\n".encode())
        time.sleep(self.pace)

    def end(self, step: int, loss: Tensor) -> None:
        if self.rank == dist.get_world_size() - 1 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
