"""A job without protection that loses a rank: `python lossy.py NODES SCRATCH WAY` runs a rank for each letter of NODES.

Each rank writes its pid into `ready.RANK` once the first collective is done, then waits inside one: even ranks in an
all_reduce of the world (WAY backward: in that of a DistributedDataParallel), odd ranks in a receive from a neighbour
that never sends. The error it gets is `error.RANK`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Makes `path` appear with all of its text."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    part.rename(path)


def run(rank: int, nodes: str, scratch: Path, way: str) -> None:
    import torch
    import torch.distributed as dist

    from keepstep.training import process_group

    torch.set_num_threads(1)
    process_group.register()
    store = dist.FileStore(str(scratch / "store"), len(nodes))
    options = process_group.Options(node=nodes[rank])
    dist.init_process_group(
        "keepstep", store=store, rank=rank, world_size=len(nodes), pg_options=options, timeout=timedelta(hours=1)
    )
    dist.all_reduce(torch.ones(10))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30))
    dist.barrier()
    write(scratch / f"ready.{rank}", str(os.getpid()))
    try:
        if rank % 2:
            dist.recv(torch.zeros(1), rank - 1)
        else:
            while way == "call":
                dist.all_reduce(torch.ones(1000))
            model(torch.ones(2, 30)).sum().backward()
    except RuntimeError as error:
        write(scratch / f"error.{rank}", str(error))


def main() -> None:
    nodes, scratch, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    processes = [
        context.Process(target=run, args=(rank, nodes, scratch, way), daemon=True) for rank in range(len(nodes))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
