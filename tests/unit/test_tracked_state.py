"""A joiner that adopts a state is bit-identical to the member it came from, then and after more steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from keepstep.errors import StateError, UnsupportedState, UsageError
from keepstep.training.manifest import CHUNK_BYTES, decode_manifest
from keepstep.training.state import TrackedState


class Net(nn.Module):
    """Small, with BatchNorm, a tied weight, a buffer that is not saved and a frozen parameter."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.two = nn.Linear(width, 4, bias=False)
        self.tied = self.two
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        return self.tied(self.norm(self.one(x))) + self.frozen


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups."""
    return [{"params": net.one.parameters()}, {"params": [*net.norm.parameters(), *net.two.parameters()], "lr": 0.01}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(groups(net), lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda net: torch.optim.AdamW(groups(net), lr=0.1, amsgrad=True),
    "tensor_lr": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1),
    "rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=0.1),
    "lbfgs": lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 2]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=50),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Member:
    """One process as the tests see it."""

    def __init__(self, seed: int, *, optimizer: str = "adamw", scheduler: str = "lambda") -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.net)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer) if scheduler else None
        self.state = TrackedState(self.net, self.optimizer, schedulers=self.scheduler)

    def step(self, number: int) -> None:
        """One update from data that depend on `number` only."""
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.net(x).square().mean()
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(float(loss))
        elif self.scheduler:
            self.scheduler.step()


def move(source: TrackedState, target: TrackedState) -> None:
    """Take the state over, through the bytes of the manifest."""
    image = source.image()
    views = target.adopt(decode_manifest(image.manifest.encode()))
    for view, buffer in zip(views, image.buffers, strict=True):
        view[:] = buffer
    target.adopted()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rehearsed", [False, True])
def test_a_joiner_goes_on_bit_for_bit(optimizer: str, rehearsed: bool) -> None:
    stayer, joiner = (Member(seed, optimizer=optimizer, scheduler="") for seed in (1, 2))
    for number in range(3):
        stayer.step(number)
    if rehearsed:
        joiner.step(99)
    assert joiner.state.replica_key() == stayer.state.replica_key()
    move(stayer.state, joiner.state)
    assert joiner.state.digest() == stayer.state.digest()
    for number in range(3, 6):
        stayer.step(number)
        joiner.step(number)
    assert joiner.state.digest() == stayer.state.digest()
    assert joiner.state.weights_sha256() == stayer.state.weights_sha256()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_move_too(scheduler: str) -> None:
    optimizer = "momentum"
    stayer, joiner = (Member(seed, optimizer=optimizer, scheduler=scheduler) for seed in (1, 2))
    for number in range(3):
        stayer.step(number)
    move(stayer.state, joiner.state)
    for number in range(3, 8):
        stayer.step(number)
        joiner.step(number)
    assert joiner.state.digest() == stayer.state.digest()
    assert [g["lr"] for g in joiner.optimizer.param_groups] == [g["lr"] for g in stayer.optimizer.param_groups]


def test_a_state_without_updates_removes_what_a_rehearsal_left() -> None:
    stayer, joiner = Member(1), Member(2)
    joiner.step(0)
    move(stayer.state, joiner.state)
    assert not joiner.optimizer.state
    assert joiner.state.digest() == stayer.state.digest()


def test_state_is_set_in_place_and_keeps_its_type() -> None:
    nets = [nn.Linear(4, 4).bfloat16() for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    for value, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
        for parameter in net.parameters():
            optimizer.state[parameter] = {"momentum_buffer": torch.full(parameter.shape, 1 / (3 + value)), "note": None}
    one, two = (TrackedState(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True))
    before = {id(tensor) for state in optimizers[1].state.values() for tensor in state.values()}
    move(one, two)
    after = [tensor for state in optimizers[1].state.values() for tensor in state.values()]
    assert {id(tensor) for tensor in after} == before
    assert after[0].dtype == torch.float32 and after[0][0, 0] == torch.tensor(1 / 3)


def test_views_are_the_live_memory() -> None:
    member = Member(1)
    image = member.state.image()
    number = [entry.name for entry in image.manifest.entries].index("parameters.model.one.weight")
    with torch.no_grad():
        member.net.one.weight.fill_(2.0)
    assert bytes(image.buffers[number]) == member.net.one.weight.detach().numpy().tobytes()


def test_buffers_and_tied_weights_are_counted_once() -> None:
    names = [entry.name for entry in Member(1).state.layout().entries]
    assert len(names) == len(set(names))
    assert "buffers.model.counter" in names and "buffers.model.norm.running_mean" in names
    assert sum("two.weight" in name or "tied.weight" in name for name in names) == 1


def test_tensors_that_are_not_contiguous() -> None:
    def build(seed: int) -> tuple[nn.Module, TrackedState]:
        torch.manual_seed(seed)
        net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        net.register_buffer("turned", torch.randn(5, 3).T)
        return net, TrackedState(net)

    (_, one), (net, two) = build(1), build(2)
    move(one, two)
    assert two.digest() == one.digest()
    assert net.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_large_entry_is_cut_into_chunks() -> None:
    state = TrackedState(nn.Linear(600, 1000))
    image = state.image()
    assert max(chunk.length for chunk in image.chunks) == CHUNK_BYTES
    assert sum(chunk.length for chunk in image.chunks) == image.manifest.nbytes
    assert len(image.chunk_digests) == 8 * len(image.chunks)


@pytest.mark.parametrize("what", ["weight", "buffer", "state", "lr", "scheduler"])
def test_every_bit_counts_for_the_digest(what: str) -> None:
    one, two = Member(1), Member(1)
    for member in (one, two):
        member.step(0)
    assert one.state.digest() == two.state.digest()
    weight = two.net.one.weight
    if what == "weight":
        weight.data.view(torch.int32)[0, 0] ^= 1
    elif what == "buffer":
        two.net.counter += 1
    elif what == "state":
        two.optimizer.state[weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    elif what == "lr":
        two.optimizer.param_groups[0]["lr"] += 1e-17
        two.optimizer.param_groups[0]["lr"] *= 1 + 1e-15
    else:
        two.scheduler.last_epoch += 1
    assert one.state.digest() != two.state.digest()


def test_several_models_optimizers_and_extra_objects() -> None:
    class Extra:
        """Any object with state."""

        def __init__(self) -> None:
            self.values: dict[str, Any] = {"mean": torch.zeros(2), "seen": 0, "odd": {1, 2}}

        def state_dict(self) -> dict[str, Any]:
            return self.values

        def load_state_dict(self, values: dict[str, Any]) -> None:
            self.values = values

    def build(seed: int) -> tuple[TrackedState, Extra, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        nets = {"gen": nn.Linear(2, 2), "dis": nn.Linear(2, 2)}
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets.values()]
        extra, scaler = Extra(), torch.amp.GradScaler("cpu", init_scale=8.0)
        ema = torch.optim.swa_utils.AveragedModel(nets["gen"])
        state = TrackedState(nets, optimizers, scaler=scaler, extra={"stats": extra, "ema": ema})
        for net, optimizer in zip(nets.values(), optimizers, strict=True):
            scaler.scale(net(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
        scaler.update(float(seed))
        return state, extra, optimizers

    one, extra, _ = build(1)
    two, other, _ = build(2)
    extra.values.update(mean=torch.randn(2), seen=7)
    assert one.digest() != two.digest()
    move(one, two)
    assert one.digest() == two.digest()
    assert other.values["seen"] == 7 and torch.equal(other.values["mean"], extra.values["mean"])
    assert other.values["mean"] is not extra.values["mean"]


def test_module_extra_state_moves() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    one, two = Counting(2, 2), Counting(2, 2)
    one.seen = 5
    move(TrackedState(one), TrackedState(two))
    assert two.seen == 5


def test_wrappers_do_not_show() -> None:
    net = Net()
    state, wrapped = TrackedState(net), TrackedState(torch.compile(net))
    assert state.digest() == wrapped.digest()
    assert state.replica_key() == wrapped.replica_key()
    assert state.replica_key() != TrackedState(net, role="expert 1").replica_key()
    assert state.replica_key() != TrackedState(Net(width=8)).replica_key()


def test_what_does_not_fit_is_named() -> None:
    small, large = TrackedState(Net()), TrackedState(Net(width=8))
    with pytest.raises(StateError) as caught:
        large.adopt(small.layout())
    assert caught.value.where.startswith("model.one.")
    with pytest.raises(StateError) as caught:
        TrackedState(nn.Linear(4, 6)).adopt(small.layout())
    assert caught.value.where.startswith("model.")
    net = Net()
    with pytest.raises(StateError) as caught:
        small.adopt(TrackedState(net, torch.optim.SGD(net.parameters())).layout())
    assert caught.value.where == "optimizer"
    with pytest.raises(StateError):
        small.adopted()


def test_objects_that_cannot_be_tracked_are_named() -> None:
    with pytest.raises(UsageError, match="scaler"):
        TrackedState(Net(), scaler=object())
    with pytest.raises(UsageError):
        TrackedState(object())
    net = Net()
    optimizer = torch.optim.SGD([{"params": net.parameters(), "hook": print}], lr=0.1)
    with pytest.raises(UnsupportedState) as caught:
        TrackedState(net, optimizer).image()
    assert caught.value.where == "optimizers.optimizer.groups[0].hook"


def test_a_buffer_that_changed_its_shape_is_replaced() -> None:
    one, two = Net(), Net()
    one.counter = torch.arange(5)
    move(TrackedState(one), TrackedState(two))
    assert torch.equal(two.counter, torch.arange(5))
