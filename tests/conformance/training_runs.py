"""Whole ways to train, as cases: `case(rank, size, scratch) -> tensors to compare`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


def batches(rank: int, size: int, count: int = 3) -> list[torch.Tensor]:
    everything = torch.randn(count, size * 4, 32, generator=torch.Generator().manual_seed(1))
    return [batch[rank * 4 : rank * 4 + 4] for batch in everything]


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [
        (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()
        for weight in module.parameters()
    ]


def train(module: nn.Module, rank: int, size: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for batch in batches(rank, size):
        optimizer.zero_grad()
        module(batch).pow(2).mean().backward()
        optimizer.step()
    return weights(module)


def ddp(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    return train(nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.005), rank, size)


def ddp_comm_hooks(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    results = []
    for hook in (default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        wrapped = nn.parallel.DistributedDataParallel(model())
        wrapped.register_comm_hook(None, hook)
        results += train(wrapped, rank, size)
    wrapped = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.005)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return results + train(wrapped, rank, size)


def ddp_join(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.algorithms.join import Join

    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with Join([wrapped]):
        for batch in batches(rank, size, 4)[: rank + 1]:
            optimizer.zero_grad()
            wrapped(batch).pow(2).mean().backward()
            optimizer.step()
    return weights(wrapped)


def ddp_accumulation(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for number, batch in enumerate(batches(rank, size, 4)):
        if number % 2 == 0:
            with wrapped.no_sync():
                wrapped(batch).pow(2).mean().backward()
        else:
            wrapped(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(wrapped)


class Branches(nn.Module):
    """Uses one of its two branches, another one on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 8)])

    def forward(self, batch: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](batch)


def ddp_unused_parameters(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    wrapped = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for number, batch in enumerate(batches(rank, size)):
        optimizer.zero_grad()
        wrapped(batch, (rank + number) % 2).pow(2).mean().backward()
        optimizer.step()
    return weights(wrapped)


def fsdp2(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    module, mesh = model(), init_device_mesh("cpu", (size,))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return train(module, rank, size)


def hsdp(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    module = model()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return train(module, rank, size)


class Block(nn.Module):
    """Two layers for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(batch)))


def tensor_parallel(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    module = parallelize_module(Block(), mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    output = module(torch.randn(4, 16, generator=torch.Generator().manual_seed(2)))
    output.sum().backward()
    square = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    gradients = [weight.grad.full_tensor() for weight in module.parameters()]
    return [output.detach(), *gradients, square.full_tensor(), (square @ square).full_tensor()]


def pipeline(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).pow(2).mean())
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(batch)
    elif rank == size - 1:
        schedule.step(target=torch.zeros(8, 8), losses=losses)
    else:
        schedule.step()
    return [layers[rank].weight.grad, *[loss.detach() for loss in losses]]


def checkpoint(rank: int, size: int, scratch: Path) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as saving
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    before = weights(module)
    state = {"model": module.state_dict()}
    saving.save(state, checkpoint_id=scratch / "now")
    saving.async_save(state, checkpoint_id=scratch / "later").result()
    results = []
    for name in ("now", "later"):
        with torch.no_grad():
            for weight in module.parameters():
                weight.zero_()
        state = {"model": module.state_dict()}
        saving.load(state, checkpoint_id=scratch / name)
        module.load_state_dict(state["model"])
        results += weights(module)
    assert all(torch.equal(one, other) for one, other in zip(results, before * 2, strict=True))
    return results


RUNS = {
    case.__name__: case
    for case in (
        ddp,
        ddp_comm_hooks,
        ddp_join,
        ddp_accumulation,
        ddp_unused_parameters,
        fsdp2,
        hsdp,
        tensor_parallel,
        pipeline,
        checkpoint,
    )
}
