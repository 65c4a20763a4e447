"""Groups that reduce something large at the same time, one rank of each below either leaf; writes what steps took.

Arguments: bytes of a reduction, steps, directory for the results. Rank r and rank r + half make a group.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep


def main() -> None:
    nbytes, steps, into = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with keepstep.join() as job:
        half = job.world // 2
        groups = [dist.new_group([number, number + half]) for number in range(half)]
        group = groups[job.rank % half]
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        buffer = torch.zeros(nbytes // 4)
        job.track(model=model, optimizer=optimizer)
        with open(into / f"rank{job.rank}.jsonl", "a", buffering=1) as log:
            for step in job.steps(total=steps):
                with step:
                    begin = time.time()
                    dist.all_reduce(buffer, group=group)
                    taken = time.time() - begin
                    model(torch.ones(4)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if step.kept:
                    log.write(json.dumps([step.number, begin, taken]) + "\n")


if __name__ == "__main__":
    main()
