"""One rank of a job without protection that loses a rank: `python lossy.py RANK SIZE NODE SCRATCH`.

Writes `ready.RANK` once the first collective is done, then waits inside one: even ranks in an all_reduce of the world,
odd ranks in a receive from a neighbour that never sends. Writes the error it gets into `error.RANK`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from keepstep.training import process_group


def main() -> None:
    rank, size, node, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    process_group.register()
    store = dist.FileStore(str(scratch / "store"), size)
    options = process_group.Options(node=node)
    dist.init_process_group(
        "keepstep", store=store, rank=rank, world_size=size, pg_options=options, timeout=timedelta(hours=1)
    )
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    (scratch / f"ready.{rank}").touch()
    try:
        if rank % 2:
            dist.recv(torch.zeros(1), rank - 1)
        else:
            while True:
                dist.all_reduce(torch.ones(1000))
    except dist.DistBackendError as error:
        (scratch / f"error.{rank}.part").write_text(str(error))
        (scratch / f"error.{rank}.part").rename(scratch / f"error.{rank}")


if __name__ == "__main__":
    main()
