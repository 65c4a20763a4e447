"""The baseline: the example's model under plain DDP on Gloo, with a checkpoint every 10 steps and restart from it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpt"))

from model import GPT, Shape, Text, standard_library
from step_log import StepLog

SAVE_EVERY = 10


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-log", default="")
    parser.add_argument("--checkpoint", default="", help="file to save to and start from; empty: never save")
    return parser.parse_args()


def save(path: Path, step: int, *, model, optimizer) -> None:
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new")
    os.replace(f"{path}.new", path)


def load(path: Path, *, model, optimizer) -> int:
    """The step to go on with."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = StepLog(args.step_log, rank=rank)
    torch.manual_seed(args.seed)
    model = GPT(Shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    path = Path(args.checkpoint) if args.checkpoint else None
    first = load(path, model=model, optimizer=optimizer) if path else 0
    model = DistributedDataParallel(model)
    text = Text(standard_library(), block=Shape().block)
    sampler = DistributedSampler(text, dist.get_world_size(), rank, seed=args.seed)
    batches = iter(DataLoader(text, batch_size=args.batch_size, sampler=sampler, drop_last=True))
    torch.manual_seed(args.seed + rank)
    for step in range(first, args.steps):
        log.begin(step)
        inputs, targets = next(batches)
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if rank == 0 and path and (step + 1) % SAVE_EVERY == 0:
            save(path, step + 1, model=model.module, optimizer=optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
