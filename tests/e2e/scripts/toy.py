"""A small job with everything a step can hold; can stop at a chosen point so that it is killed from outside there.

`--hold RANK:STEP:POINT[:N]` with POINT one of collective (the N-th of the step), agreed, updating, updated, forward.
The first process that gets there writes its pid to `--marker` and waits; a process that finds the marker goes on.
`--freeze-holder RANK:N`: that rank stops itself (SIGSTOP) inside the N-th mirror that it takes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepstep
from keepstep.training.shelf import Shelf


class Noisy(Dataset):
    """Items that use all three random number generators, so that a wrong one is seen."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.full((8,), index / 96) + torch.rand(8) + float(numpy.random.rand()) + random.random()
        return x, index


def forever(loader: DataLoader):
    """The loader as a generator, which cannot begin again."""
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


class Momentum(torch.optim.Optimizer):
    """SGD with momentum in plain Python, so that a process can be stopped in the middle of an update."""

    def __init__(self, params, lr: float, middle) -> None:
        super().__init__(params, {"lr": lr})
        self.middle = middle

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for i, p in enumerate(params):
            if i == len(params) // 2:
                self.middle()
            velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
            velocity.mul_(0.9).add_(p.grad)
            p.sub_(velocity, alpha=self.param_groups[0]["lr"])


class Holds:
    """Stops this process at the chosen points."""

    def __init__(self, specs: list[str], marker: str) -> None:
        self.specs = [spec.split(":") for spec in specs]
        self.marker = marker
        self.rank = -1
        self.step = -1
        self.count = 0

    def at(self, point: str) -> None:
        for i, (rank, step, where, *rest) in enumerate(self.specs):
            if (int(rank), int(step), where) != (self.rank, self.step, point):
                continue
            if point == "collective" and self.count != int(rest[0]):
                continue
            marker = Path(f"{self.marker}.{i}")
            try:
                with marker.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                continue
            time.sleep(600)

    def watch_collectives(self) -> None:
        group = type(dist.distributed_c10d._get_default_group())
        for name in ("allreduce", "broadcast", "allgather", "all_gather_single", "reduce_scatter_single"):
            setattr(group, name, self._counted(getattr(group, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            if self.step >= 0:
                self.at("collective")
                self.count += 1
            return call(*args, **kwargs)

        return counted


def freeze_inside_mirror(rank: int, nth: int, *, marker: str) -> None:
    """Stop this process, if no other one did before, where it has made room for the `nth` copy of another rank."""
    room, taken = Shelf.room, []

    def counted(shelf, owner, nbytes):
        taken.extend([owner] * (owner != rank))
        if owner != rank and len(taken) == nth:
            with contextlib.suppress(FileExistsError), Path(marker).open("x") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.kill(os.getpid(), signal.SIGSTOP)
        return room(shelf, owner, nbytes)

    Shelf.room = counted


def build(args: argparse.Namespace, holds: Holds):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8)
    )
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        model = fully_shard(model)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = Momentum(model.parameters(), 0.05, lambda: holds.at("updating"))
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hold", action="append", default=[])
    parser.add_argument("--marker", default="")
    parser.add_argument("--freeze-holder", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--no-mirror", action="store_true")
    parser.add_argument("--local", default="", help="local disk for checkpoints after every step")
    parser.add_argument("--generator", action="store_true", help="give job.data() an iterator")
    parser.add_argument("--raise-at", default="")
    parser.add_argument("--die-at", default="")
    parser.add_argument("--flip", default="", help="RANK:STEP: flip one bit of a weight after that step")
    parser.add_argument("--tail", action="store_true", help="reduce the loss behind the block, too")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--meet", action="store_true", help="raise where a step does not begin with all ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    holds = Holds(args.hold, args.marker)
    with keepstep.join() as job:
        rank = holds.rank = dist.get_rank()
        holds.watch_collectives()
        if args.freeze_holder.startswith(f"{rank}:"):
            freeze_inside_mirror(rank, int(args.freeze_holder.split(":")[1]), marker=f"{args.marker}.frozen")
        model, optimizer = build(args, holds)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for seed, value in ((torch.manual_seed, rank), (numpy.random.seed, rank), (random.seed, rank)):
            seed(value + 100)
        job.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        if args.checkpoint:
            job.checkpoint(args.checkpoint, every=4, local=args.local or None, local_every=1 if args.local else 0)
        if args.no_mirror:
            job.mirror(False)
        data = Noisy()
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3), drop_last=True)
        batches = job.data(forever(loader) if args.generator else loader)
        optimizer.register_step_pre_hook(lambda *_: holds.at("agreed"))
        log = Path(args.out or os.devnull) / f"rank-{rank}.log" if args.out else None
        for step in job.steps(total=args.steps):
            seen = []
            with step:
                holds.step, holds.count = step.number, 0
                if args.raise_at == f"{rank}:{step.number}":
                    raise ValueError("the user's own mistake")
                if args.die_at == f"{rank}:{step.number}":
                    os.abort()
                time.sleep(args.pace)
                if args.meet:
                    ranks = [-1] * dist.get_world_size()
                    dist.all_gather_object(ranks, rank)
                    assert ranks == list(range(len(ranks))), ranks
                for micro in range(2):
                    x, index = next(batches)
                    seen += index.tolist()
                    if not args.fsdp:
                        model.require_backward_grad_sync = micro == 1
                    loss = model(x).pow(2).mean()
                    holds.at("forward")
                    scaler.scale(loss).backward()
                if not args.fsdp:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                holds.at("updated")
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            if args.tail and step.kept:
                holds.at("tail")
                shown = loss.detach().clone()
                dist.all_reduce(shown)
            holds.step = -1
            if args.flip == f"{rank}:{step.number}" and step.kept:
                with torch.no_grad():
                    next(iter(model.parameters())).view(torch.int32)[0, 0] ^= 1
            if step.kept and log is not None:
                with log.open("a") as file:
                    file.write(f"{step.number} {float(loss).hex()} {seen} {os.getpid()}\n")


if __name__ == "__main__":
    main()
