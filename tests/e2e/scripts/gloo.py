"""Plain data-parallel training on Gloo that knows nothing of keepstep, with its own checkpoint.

`--wrong RANK:STEP:HOW`, in the first attempt only: lock (it dead-locks with itself), other (it calls another collective
than the rest), size (its all_reduce is longer than that of the rest), slow (its loader takes long from there on).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step")
parser.add_argument("--checkpoint", type=Path, required=True)
parser.add_argument("--wrong", default="-1:-1:none")
args = parser.parse_args()
wrong_rank, wrong_step, how = args.wrong.split(":")
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Numbers(Dataset):
    """Items whose making may take long."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if how == "slow" and due(index):
            time.sleep(0.4)
        return torch.full((8,), index % 100 / 100.0)


def due(step: int) -> bool:
    return attempt == 0 and rank == int(wrong_rank) and step >= int(wrong_step)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if args.checkpoint.exists():
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    first = saved["step"]
    print(f"goes on from step {first}", flush=True)
loader = iter(DataLoader(Numbers(), batch_size=1))
for step in range(first, args.steps):
    batch = next(loader)
    time.sleep(args.pace)
    if how == "lock" and due(step):
        lock = threading.Lock()
        with lock:
            lock.acquire()
    if how == "other" and due(step):
        dist.broadcast(torch.ones(1), 0)
    if how == "size":
        dist.all_reduce(torch.ones(100_000 if due(step) else 10))
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        torch.save({"model": model.state_dict(), "step": step + 1}, args.checkpoint)
dist.barrier()
print(f"done after {args.steps} steps in attempt {attempt}", flush=True)
dist.destroy_process_group()
