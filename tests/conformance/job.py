"""Runs all cases in 4 processes on one backend: `python job.py VARIANT SCRATCH`; each rank writes `RANK.CASE`.

VARIANT is gloo, shared, tcp or mixed: the latter three are keepstep with all ranks on one node, each on its own, and
two nodes of two.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import warnings
from pathlib import Path

NODES = {"shared": "aaaa", "tcp": "abcd", "mixed": "aabb"}
SIZE = 4


def run(rank: int, variant: str, scratch: Path) -> None:
    import torch
    import torch.distributed as dist
    from operations import COMPARED, OURS
    from training_runs import RUNS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), SIZE)
    if variant == "gloo":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    else:
        from keepstep.training import process_group

        process_group.register()
        options = process_group.Options(node=NODES[variant][rank])
        dist.init_process_group("keepstep", store=store, rank=rank, world_size=SIZE, pg_options=options)
    for name, case in {**COMPARED, **(OURS if variant != "gloo" else {}), **RUNS}.items():
        arguments = (rank, SIZE, scratch / name) if name in RUNS else (rank, SIZE)
        try:
            torch.save(("ok", case(*arguments)), scratch / f"{rank}.{name}")
        except BaseException as error:  # for the report of the test
            said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            torch.save(("error", said), scratch / f"{rank}.{name}")
            raise
    dist.destroy_process_group()


def main() -> int:
    variant, scratch = sys.argv[1], Path(sys.argv[2])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    processes = [context.Process(target=run, args=(rank, variant, scratch)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
