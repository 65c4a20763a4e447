"""State of real ranks: replicas are equal at every boundary, shards are not, and both move between processes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.state import TrackedState

WORLD = 2


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrackedState]:
    """A model with statistics under DDP, or sharded unevenly under FSDP2."""
    torch.manual_seed(seed)
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    else:
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, TrackedState(model, optimizer)


def member(rank: int, kind: str, directory: str, results: multiprocessing.queues.Queue[Any]) -> None:
    """One rank: train, keep, continue; then load into fresh objects, continue alike, and compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    places = []

    def train(made: tuple[nn.Module, torch.optim.Optimizer, TrackedState], steps: range) -> None:
        model, optimizer, state = made
        for step in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
            model(x).square().mean().backward()
            state.sync_buffers()
            optimizer.step()
            optimizer.zero_grad()
            places.append(state.digest())

    first = build(kind, seed=1)
    train(first, range(3))
    writer = CheckpointWriter(Path(directory), rank=rank, world=WORLD)
    keys: list[Any] = [None] * WORLD
    dist.all_gather_object(keys, first[2].replica_key())
    writer.save(3, first[2], private=b"", replicas=dict(enumerate(keys)))
    writer.wait()
    dist.barrier()
    train(first, range(3, 5))
    second = build(kind, seed=2)
    writer.load(3, second[2])
    train(second, range(3, 5))
    results.put((rank, keys, places, second[2].weights_sha256()))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_replicas_and_shards(kind: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    members = [context.Process(target=member, args=(rank, kind, str(tmp_path), results)) for rank in range(WORLD)]
    for one in members:
        one.start()
    found = sorted(results.get(timeout=120) for _ in members)
    for one in members:
        one.join()
    (_, keys, places, weights), (_, _, other_places, other_weights) = found
    assert places[3:5] == places[5:7] and other_places[3:5] == other_places[5:7]
    if kind == "ddp":
        assert keys[0] == keys[1] and places == other_places and weights == other_weights
    else:
        assert keys[0] != keys[1] and not set(places) & set(other_places)
