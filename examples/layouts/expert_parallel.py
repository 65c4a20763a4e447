"""Expert parallel: tokens travel to the rank of their expert and back, by all_to_all with sizes that the data decide.

keepstep run --nproc-per-node 4 --standby 1 examples/layouts/expert_parallel.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from small import WIDTH, Block, Progress, Samples, average_gradients, batches_for, options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import keepstep

EXPERTS = 4


class Exchange(torch.autograd.Function):
    """Rows to other ranks and, backwards, their gradients home again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *route: Any) -> Tensor:
        sent, received, group = route
        ctx.sizes, ctx.group = (sent, received), group
        got = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(got, rows.contiguous(), received, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        home = gradients.new_empty(sum(sent), gradients.shape[1])
        dist.all_to_all_single(home, gradients.contiguous(), sent, received, group=ctx.group)
        return home, None, None, None


class Mixture(nn.Module):
    """Sends every row to the expert its router likes most. This rank holds its share of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)
        self.router = nn.Linear(WIDTH, EXPERTS)
        everything = [Block() for _ in range(EXPERTS)]  # made on all ranks, so that all draw the same random numbers
        mine = EXPERTS // self.ranks
        first = dist.get_rank(group) * mine
        self.experts = nn.ModuleList(everything[first : first + mine])

    def forward(self, rows: Tensor) -> Tensor:
        likes = self.router(rows).softmax(dim=1)
        weight, chosen = likes.max(dim=1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(dim=1).tolist()
        received = theirs.view(self.ranks, -1).sum(dim=1).tolist()
        rows_here = Exchange.apply(rows[order], sent, received, self.group)
        results = Exchange.apply(self.computed(rows_here, theirs), received, sent, self.group)
        return torch.empty_like(rows).index_copy(0, order, results) * weight[:, None]

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Every row through its expert; they come rank by rank, and expert by expert within a rank."""
        pieces = rows.split(counts.tolist())
        return torch.cat([self.experts[number % len(self.experts)](piece) for number, piece in enumerate(pieces)])


def main() -> None:
    args = options(__doc__ or "")
    samples = Samples()
    with keepstep.join() as job:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "experts"))
        torch.manual_seed(args.seed)
        layers = [Mixture(mesh.get_group("experts")) for _ in range(2)]
        model = nn.Sequential(Block(), *layers)
        experts = [parameter for layer in layers for parameter in layer.experts.parameters()]
        shared = [p for p in model.parameters() if all(p is not other for other in experts)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        progress = Progress(args)
        torch.manual_seed(args.seed + rank)
        job.track(model=model, optimizer=optimizer, role=f"experts{mesh.get_local_rank('experts')}")
        if args.checkpoints:
            job.checkpoint(args.checkpoints, every=5)
        batches = job.data(batches_for(samples, args, place=rank, places=world))

        for step in job.steps(total=args.steps):
            with step:
                progress.begin(step.number)
                inputs, targets = next(batches)
                loss = mse_loss(model(inputs), targets)
                loss.backward()
                average_gradients(shared, dist.group.WORLD)
                average_gradients(experts, mesh.get_group("replicas"))
                optimizer.step()
                optimizer.zero_grad()
                progress.end(step.number, loss)


if __name__ == "__main__":
    main()
