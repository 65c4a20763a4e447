"""One rank of a Gloo job that leaves a Flight Recorder dump: arguments rank, world, folder, absent rank (-1: none)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as recorder


def main():
    rank, world, folder, absent = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    pair = [dist.new_group([first, first + 1]) for first in range(0, world, 2)][rank // 2]
    tensor = torch.ones(8)
    for _ in range(5):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=pair)
    pending = dist.all_reduce(tensor, async_op=True) if absent >= 0 and rank != absent else None
    meet(store, world, "called")
    await_retirement(0 if pending is None else 1)
    (folder / f"dump_{rank}").write_bytes(recorder._dump_fr_trace())
    (folder / f"json_{rank}.json").write_text(text_of(recorder._dump_fr_trace_json()))
    meet(store, world, "dumped")
    os._exit(0 if pending is None or not pending.is_completed() else 1)


def await_retirement(pending):
    """Gloo notes the end of an operation a moment after its wait() returned: let it."""
    while (
        sum(not entry["retired"] for entry in json.loads(text_of(recorder._dump_fr_trace_json()))["entries"]) > pending
    ):
        time.sleep(0.01)


def meet(store, world, name):
    """Wait until all ranks are here."""
    if store.add(name, 1) == world:
        store.set(f"{name} all", "yes")
    store.wait([f"{name} all"])


def text_of(dump):
    return dump if isinstance(dump, str) else dump.decode()


if __name__ == "__main__":
    main()
