"""FSDP2, HSDP and DTensor state: only replicas share a key, local parts move, an interrupted step can be redone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.errors import StateError
from keepstep.training.manifest import decode_manifest
from keepstep.training.sharding import forget_meshes
from keepstep.training.state import TrackedState


@contextmanager
def group(rank: int, world: int, *, backend: str = "fake") -> Iterator[None]:
    """This process as `rank` of `world`; with the fake backend nobody else is there."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=rank, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def net(seed: int = 0) -> nn.Sequential:
    """A small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def sharded(shape: tuple[int, ...], names: tuple[str, ...], seed: int = 0) -> nn.Sequential:
    """The model under fully_shard, layer by layer, over a mesh."""
    model = net(seed)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def keys(world: int, build: Callable[[], nn.Module]) -> list[str]:
    """The replica key of every rank."""
    found = []
    for rank in range(world):
        with group(rank, world):
            found.append(TrackedState(build()).replica_key())
    return found


def test_shards_are_no_replicas_of_each_other() -> None:
    found = keys(4, lambda: sharded((4,), ("dp",)))
    assert len(set(found)) == 4


def test_forgotten_meshes_do_not_come_back() -> None:
    for rank in range(3):
        with group(rank, 4):
            mesh = next(sharded((4,), ("dp",)).parameters()).device_mesh
            assert mesh.get_coordinate() == (rank,)


def test_replicate_dimensions_do_not_count() -> None:
    found = keys(4, lambda: sharded((2, 2), ("replicate", "shard")))
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


def test_data_parallel_groups_tell_stages_apart() -> None:
    def build() -> nn.Module:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return DistributedDataParallel(net(), process_group=groups[dist.get_rank() // 2])

    found = keys(4, build)
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


def test_the_key_does_not_need_optimizer_state() -> None:
    with group(0, 1, backend="gloo"):
        model = sharded((1,), ("dp",))
        optimizer = torch.optim.AdamW(model.parameters())
        state = TrackedState(model, optimizer)
        before = state.replica_key()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert state.replica_key() == before


@pytest.mark.parametrize("mixed", [False, True])
def test_sharded_state_moves_and_goes_on(mixed: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrackedState]:
        model = net(seed)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        fully_shard(model[0], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, TrackedState(model, optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(torch.full((2, 8), number / 7)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with group(0, 1, backend="gloo"):
        one, two = build(1), build(2)
        for number in range(3):
            step(*one[:2], number)
        with torch.no_grad():
            one[0](torch.ones(2, 8))
        image = one[2].image()
        views = two[2].adopt(decode_manifest(image.manifest.encode()))
        for view, buffer in zip(views, image.buffers, strict=True):
            view[:] = buffer
        two[2].adopted()
        assert one[2].digest() == two[2].digest()
        for number in range(3, 6):
            step(*one[:2], number)
            step(*two[:2], number)
        assert one[2].digest() == two[2].digest()


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_an_interrupted_sharded_step_is_done_again(where: str) -> None:
    class Broken(RuntimeError):
        """What user code may raise in a poisoned step."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, TrackedState]:
        model = sharded((1,), ("dp",), seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, TrackedState(model, optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def raise_broken(*_: object) -> None:
        raise Broken

    with group(0, 1, backend="gloo"):
        (model, optimizer, state), plain = build(), build()
        step(model, optimizer)
        step(*plain[:2])
        state.snapshot()
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 8)).sum().backward()
        if where != "between":
            layer = model[2]
            hook = layer.register_forward_pre_hook(raise_broken)
            if where == "backward":
                hook.remove()
                hook = layer.register_full_backward_pre_hook(raise_broken)
            with pytest.raises(Broken):
                model(torch.ones(2, 8)).sum().backward()
            hook.remove()
        state.restore()
        step(model, optimizer)
        step(*plain[:2])
        assert state.digest() == plain[2].digest()


def test_other_shards_are_refused() -> None:
    def build(dimension: int) -> TrackedState:
        model = net()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(dimension)])
        model[0].weight = nn.Parameter(weight)
        return TrackedState(model)

    with group(0, 2):
        rows, columns, plain = build(0), build(1), TrackedState(net())
        with pytest.raises(StateError) as caught:
            columns.adopt(rows.layout())
        assert caught.value.where == "model.0.weight"
        with pytest.raises(StateError):
            plain.adopt(rows.layout())


def test_shared_buffers_are_known_only_for_data_parallel_modules() -> None:
    with group(0, 1, backend="gloo"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert not TrackedState(model).has_shared_buffers
        assert not TrackedState(DistributedDataParallel(model, broadcast_buffers=False)).has_shared_buffers
        state = TrackedState(DistributedDataParallel(model))
        before = state.digest()
        assert state.has_shared_buffers
        state.sync_buffers()
        assert state.digest() == before
