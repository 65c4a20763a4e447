"""A small job in one of several layouts, with everything that a rehearsal could leave behind.

It writes files, logs and prints, counts what torch.compile compiles, and says for each kept step what it saw.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import keepstep

WIDTH = 16


class Block(torch.nn.Module):
    """Something worth compiling."""

    made = 0

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        Block.made += 1
        self.first = torch.nn.Linear(width, 2 * width)
        self.second = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


class Exchange(torch.autograd.Function):
    """Rows to other ranks and back, in numbers that depend on the data."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        back = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), sent, received)
        return back, None, None


class Experts(torch.nn.Module):
    """One expert a rank; each row goes to the one that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, dist.get_world_size())
        self.expert = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(dim=1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        assert int(received.sum()) <= 4096, "sizes that nobody sent"
        there = Exchange.apply(x[order], sent.tolist(), received.tolist())
        back = Exchange.apply(self.expert(there), received.tolist(), sent.tolist())
        return back[order.argsort()]


class Pipeline(torch.nn.Module):
    """The own stage of two: forward sends or receives activations, backward gradients."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.block = Block()

    def train_on(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            out = self.block(x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
            return out.detach().mean()
        got = torch.empty(x.shape).requires_grad_()
        dist.recv(got.data, 0)
        loss = self.block(got).pow(2).mean()
        loss.backward()
        dist.send(got.grad, 0)
        return loss.detach()


def build(layout: str, rank: int, backend: str):
    torch.manual_seed(7)
    if layout == "experts":
        return Experts()
    if layout == "pipeline":
        return Pipeline(rank)
    model = torch.nn.Sequential(Block(), torch.nn.Dropout(0.1), Block())
    if layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            if isinstance(block, Block):
                fully_shard(block)
        return fully_shard(model)
    if layout == "compiled":
        for block in model:
            block.compile(backend=backend)
    return DistributedDataParallel(model)


def compiled() -> int:
    return torch._dynamo.utils.counters["frames"]["total"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--out", required=True)
    parser.add_argument("--fail-in-rehearsal", action="store_true")
    parser.add_argument("--gate", type=int, default=-1, help="wait in this step until the file `go` is there")
    parser.add_argument("--before", default="", help="a file to which each run of the script adds a line before join()")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = Path(args.out)
    began = Block.made
    if args.before:
        with open(args.before, "a") as file:
            file.write(f"{os.getpid()}\n")
    with keepstep.join() as job:
        rank = dist.get_rank()
        (out / "trackers" / f"rank-{rank}").mkdir(parents=True, exist_ok=True)
        tracker = (out / "trackers" / f"rank-{rank}" / f"{os.getpid()}.jsonl").open("a")
        logging.basicConfig(filename=out / f"log-{rank}.txt", force=True)
        name = [f"run of rank {rank}"]
        dist.broadcast_object_list(name)
        model = build(args.layout, rank, args.backend)
        pair = dist.new_group([0, 1])
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        role = f"part {rank}" if args.layout in ("pipeline", "experts") else ""
        job.track(model=model, optimizer=optimizer, role=role)
        data = torch.utils.data.TensorDataset(torch.rand(256, WIDTH, generator=torch.Generator().manual_seed(3)))
        sampler = DistributedSampler(data, seed=3) if args.layout != "pipeline" else None
        batches = job.data(DataLoader(data, batch_size=8, sampler=sampler, drop_last=True))
        before = compiled()
        for step in job.steps(total=args.steps):
            began_s = time.monotonic()
            with step:
                if args.fail_in_rehearsal and job.rehearsing:
                    raise RuntimeError("only in the sandbox")
                while step.number == args.gate and not (out / "go").exists():
                    time.sleep(0.02)
                (x,) = next(batches)
                if args.layout == "pipeline":
                    loss = model.train_on(x)
                else:
                    loss = model(x + torch.rand(1) * random.random()).pow(2).mean()
                    loss.backward()
                torch.save({"step": step.number}, out / f"saved-{rank}-{os.getpid()}.pt")
                optimizer.step()
                optimizer.zero_grad()
                tracker.write(json.dumps({"step": step.number, "rehearsing": job.rehearsing}) + "\n")
                tracker.flush()
                logging.warning("step %d", step.number)
                print(f"rank {rank} step {step.number} by {os.getpid()} rehearsing {job.rehearsing}", flush=True)
                time.sleep(args.pace)
            if step.kept:
                seen = {
                    "step": step.number,
                    "pid": os.getpid(),
                    "loss": float(loss.detach()).hex(),
                    "name": name[0],
                    "groups": [dist.group.WORLD.group_name, pair.group_name if rank < 2 else ""],
                    "made": Block.made - began,
                    "compiled": compiled() - before,
                    "seconds": time.monotonic() - began_s - args.pace,
                }
                before = compiled()
                with (out / f"rank-{rank}.jsonl").open("a") as file:
                    file.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
