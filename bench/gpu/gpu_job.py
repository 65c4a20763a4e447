"""A small DDP job for `check_one_gpu.py`: all ranks on one device; rank 1 kills itself once if `--kill FILE` is given.

Prints the hash of the final weights of every rank.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

KILLED_STEP = 5


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", default="", metavar="FILE", help="made by the rank that kills itself")
    return parser.parse_args()


def perhaps_die(rank: int, step: int, flag: str) -> None:
    """In the middle of a step, once."""
    if flag and rank == 1 and step == KILLED_STEP and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = options()
    device = torch.device(args.device, 0) if args.device != "cpu" else torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8)).to(device)
    with keepstep.join() as job:
        rank = dist.get_rank()
        model = DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(100 + rank)
        job.track(model=model, optimizer=optimizer)
        for step in job.steps(total=args.steps):
            with step:
                inputs = torch.randn(16, 64, device=device)
                loss = model(inputs).pow(2).mean()
                loss.backward()
                perhaps_die(rank, step.number, args.kill)
                optimizer.step()
                optimizer.zero_grad()
        hasher = hashlib.sha256()
        for parameter in model.parameters():
            hasher.update(parameter.detach().cpu().numpy().tobytes())
        print(f"weights {hasher.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
