"""Two models, two optimizers, an iterable without state; stops once at a chosen point to be killed there."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from holding import hold
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Waves:
    """Batches that depend on the rank and the place in the stream."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.count():
            yield torch.sin(torch.arange(32.0) * (number + 1) + self.rank).reshape(4, 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marker", default="")
    parser.add_argument("--point", default="", help="first: between the updates; second: after the second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with keepstep.join() as job:
        torch.manual_seed(1)
        first = DistributedDataParallel(torch.nn.Linear(8, 8))
        second = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizers = [torch.optim.Adam(first.parameters(), 0.01), torch.optim.SGD(second.parameters(), 0.01, 0.9)]
        job.track(model=[first, second], optimizer=optimizers)
        batches = job.data(Waves(dist.get_rank()))
        for step in job.steps(total=10):
            with step:
                here = args.marker and dist.get_rank() == 1 and step.number == 5
                batch = next(batches)
                second(first(batch)).pow(2).mean().backward()
                optimizers[0].step()
                if here and args.point == "first":
                    hold(args.marker)
                second.zero_grad()
                second(first(batch).detach()).abs().mean().backward()
                optimizers[1].step()
                if here and args.point == "second":
                    hold(args.marker)
                for optimizer in optimizers:
                    optimizer.zero_grad()


if __name__ == "__main__":
    main()
