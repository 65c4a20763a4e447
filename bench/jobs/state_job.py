"""A job with much state and little to compute, for bench/state_copy.py: says how long steps take and its memory.

`--die STEP`: rank 1 ends itself in the middle of that step, once. Lines: `step RANK SECONDS`, `before RANK KILOBYTES`
(the most resident memory up to that step), `after RANK KILOBYTES` (at the end).
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def build(width: int, *, fsdp: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    if not fsdp:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--die", type=int, default=-1)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--no-mirror", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with keepstep.join() as job:
        rank, lines, began = dist.get_rank(), [], 0.0
        model = build(args.width, fsdp=args.fsdp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        job.track(model=model, optimizer=optimizer)
        if args.fsdp:
            job.mirror(not args.no_mirror)
        died = Path(args.out) / "died"
        for step in job.steps(total=args.steps):
            began = time.perf_counter()
            with step:
                loss = model(torch.ones(64, args.width)).square().mean()
                if rank == 1 and step.number == args.die and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                if step.number == args.die - 1:
                    lines.append(f"before {rank} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")
                optimizer.step()
                optimizer.zero_grad()
            if step.kept and step.number > 3:
                lines.append(f"step {rank} {time.perf_counter() - began:.6f}")
        lines.append(f"after {rank} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")
        (Path(args.out) / f"rank-{rank}").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
