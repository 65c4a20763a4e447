"""What keepstep writes is read by plain `torch.distributed.checkpoint`, also with another world size."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_state_sharded import group, net, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from keepstep.training.checkpoint import CheckpointWriter, load, step_directory, valid_steps
from keepstep.training.state import TrackedState
from keepstep.training.tiers import Tier, Tiers


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state, after two updates with gradients that depend on places only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * (number + 1)
        optimizer.step()
    return optimizer


def member(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrackedState]:
    model = net(seed)
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return model, optimizer, TrackedState(model, optimizer, schedulers=scheduler)


def write(directory: Path, step: int, states: list[TrackedState], **options) -> Path:
    for rank, state in enumerate(states):
        writer = CheckpointWriter(directory, rank=rank, world=len(states), **options)
        writer.save(step, state, private=b"own")
        writer.close()
    return step_directory(directory, step)


def test_a_script_without_keepstep_loads_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer, state = member(1)
    place = write(tmp_path, 5, [state])
    other, other_optimizer, _ = member(2)
    wanted = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, other_optimizer)}
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    other.load_state_dict(wanted["model"])
    set_optimizer_state_dict(other, other_optimizer, wanted["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert other_optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_shards_come_together_in_another_world_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Written by a world of fully sharded members (the last mesh dimension shards), read by one process."""
    world = int(torch.tensor(shape).prod())
    names = ("replicate", "shard")[-len(shape) :]
    for rank in range(world):
        with group(rank, world):
            model = sharded(shape, names, seed=3)
            state = TrackedState(model, trained(model))
            keys = {other: "x" for other in range(world) if other != rank}
            writer = CheckpointWriter(tmp_path, rank=rank, world=world)
            writer.save(1, state, private=b"", replicas=keys)
            writer.close()
            assert any(isinstance(one, DTensor) for one in model.parameters())
    whole = net(3)
    optimizer = trained(whole)
    read = net(9)
    wanted = {"model": read.state_dict(), "optimizer": get_optimizer_state_dict(read, trained(read))}
    dcp.load(wanted, checkpoint_id=step_directory(tmp_path, 1), no_dist=True)
    read.load_state_dict(wanted["model"])
    for a, b in zip(whole.parameters(), read.parameters(), strict=True):
        assert torch.equal(a, b)
    expected = get_optimizer_state_dict(whole, optimizer)["state"]
    for name, state in wanted["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], expected[name]["exp_avg"])


def test_stages_that_name_their_layers_alike_do_not_mix(tmp_path: Path) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    place = write(tmp_path, 1, [TrackedState(first, role="first"), TrackedState(last, role="last")])
    wanted = {"model": nn.Linear(4, 4).state_dict(), "__1_0/model.weight": torch.zeros(2, 4)}
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    assert torch.equal(wanted["model"]["weight"], first.weight)
    assert torch.equal(wanted["__1_0/model.weight"], last.weight)
    fresh = TrackedState(nn.Linear(4, 2), role="last")
    load(tmp_path, 1, rank=1, world=2, state=fresh)
    assert fresh.digest() == TrackedState(last, role="last").digest()


def test_experts_of_equal_names_and_shapes_do_not_vanish(tmp_path: Path) -> None:
    """What is equal is there once, under its own name; what differs is there of every rank."""
    shared, experts = nn.Linear(3, 3), [nn.Linear(4, 4), nn.Linear(4, 4)]
    models = [nn.ModuleDict({"shared": shared, "expert": expert}) for expert in experts]
    place = write(tmp_path, 1, [TrackedState(model, role=f"{rank}") for rank, model in enumerate(models)])
    wanted = {"model.expert.weight": torch.zeros(4, 4), "__1_0/model.expert.weight": torch.zeros(4, 4)}
    dcp.load(wanted, checkpoint_id=place, no_dist=True)
    for got, expert in zip(wanted.values(), experts, strict=True):
        assert torch.equal(got, expert.weight)
    names = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    assert [name for name in names if "shared.weight" in name] == ["model.shared.weight"]


def test_shards_of_another_tensor_of_that_name_stand_for_themselves(tmp_path: Path) -> None:
    """Two ranks shard one tensor, two others another one of the same name and size."""
    for rank in range(4):
        with group(rank % 2, 2):
            state = TrackedState(sharded((2,), ("shard",), seed=rank // 2), role=f"{rank // 2}")
            own = {n: p.to_local().detach().clone() for n, p in state.modules["model"].named_parameters()}
            writer = CheckpointWriter(tmp_path, rank=rank, world=4)
            writer.save(1, state, private=b"")
            writer.close()
    name, shard = next((name, one) for name, one in own.items() if one.numel())
    wanted = {f"__3_0/model.{name}": torch.zeros(shard.shape)}
    dcp.load(wanted, checkpoint_id=step_directory(tmp_path, 1), no_dist=True)
    (got,) = wanted.values()
    assert torch.equal(got, shard)


def old_checkpoint(directory: Path, state: TrackedState, *, step: int) -> None:
    """What keepstep wrote before: header and bytes in one file."""
    place = step_directory(directory, step)
    place.mkdir(parents=True)
    image = state.image()
    header = msgspec.msgpack.encode({"private": b"old", "manifest": image.manifest.encode()})
    data = b"KSCKPT01" + struct.pack("<Q", len(header)) + header + b"".join(map(bytes, image.buffers))
    (place / "rank-00000.ks").write_bytes(data)
    page = {"version": 1, "step": step, "world": 1, "rank": 0, "replica": state.replica_key(), "holder": 0}
    page |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "rank-00000.json").write_text(json.dumps(page))


def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path) -> None:
    old = member(1)[2]
    old_checkpoint(tmp_path, old, step=4)
    write(tmp_path, 8, [member(2)[2]])
    assert valid_steps(tmp_path, rank=0, world=1) == ([4, 8], [])
    fresh = member(3)[2]
    assert load(tmp_path, 4, rank=0, world=1, state=fresh) == b"old"
    assert fresh.digest() == old.digest()


def test_each_tier_has_its_own_interval_and_the_local_one_needs_no_other_rank(tmp_path: Path) -> None:
    states = [member(1)[2], member(1)[2]]
    both = []
    for rank in range(2):
        shared = CheckpointWriter(tmp_path / "shared", rank=rank, world=2, keep=9)
        local = CheckpointWriter(tmp_path / f"disk{rank}", rank=rank, world=2, keep=2, alone=True)
        tiers = Tiers()
        tiers.set([Tier(shared, 4), Tier(local, 1, local=True)])
        both.append(tiers)
    for version in range(1, 10):
        for rank, tiers in enumerate(both):
            if tiers.due(version):
                tiers.save(version, states[rank], private=b"%d" % version, replicas={})
            tiers.settle()
    found = both[0].valid_steps()
    assert found.steps == (4, 8, 9) and found.skipped == () and found.local == (8, 9)
    damaged = tmp_path / "disk0" / "step-00000009" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = both[0].valid_steps()
    assert found.steps == (4, 8) and found.local == (8,)
    assert "step 9" in found.skipped[0] and "local disk" in found.skipped[0]
    assert both[1].valid_steps().steps == (4, 8, 9)
    assert both[0].load(8, states[0]) == b"8" and both[0].load(4, states[0]) == b"4"
    for tiers in both:
        tiers.close()


def test_a_step_of_another_generation_on_local_disk_gives_way_to_shared_storage(tmp_path: Path) -> None:
    state = member(1)[2]
    shared = CheckpointWriter(tmp_path / "shared", rank=0, world=1)
    local = CheckpointWriter(tmp_path / "local", rank=0, world=1, alone=True)
    tiers = Tiers()
    tiers.set([Tier(shared, 4), Tier(local, 4, local=True)])
    tiers.save(4, state, private=b"first", replicas={}, written_in="job/1")
    assert (tiers.valid_steps().local, tiers.valid_steps().written_in) == ((4,), ("job/1",))
    shared.save(4, state, private=b"second", written_in="job/3")
    found = tiers.valid_steps()
    assert (found.steps, found.local, found.written_in) == ((4,), (), ("job/3",))
    assert tiers.load(4, state) == b"second"
    tiers.close()
