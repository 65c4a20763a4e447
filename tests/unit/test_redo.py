"""A step that is done again gives the same bits as one that was done once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from keepstep.training.state import TrackedState


def build(*, scaler: bool = False) -> tuple[nn.Module, list[torch.optim.Optimizer], Any, TrackedState]:
    """A model with statistics, two optimizers, a scheduler and perhaps a scaler."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(net[0].parameters(), lr=0.1),
        torch.optim.SGD([*net[1].parameters(), *net[2].parameters()], lr=0.1, momentum=0.9),
    ]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    scale = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) if scaler else None
    return net, optimizers, scale, TrackedState(net, optimizers, schedulers=scheduler, scaler=scale)


def backward(net: nn.Module, number: int) -> None:
    """One micro-batch."""
    net(torch.randn(8, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()


def test_a_cheap_snapshot_undoes_everything_before_the_update() -> None:
    net, optimizers, _, state = build()
    backward(net, 0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    before = state.digest()
    for _ in range(2):
        state.snapshot()
        for _ in range(2):
            backward(net, 7)
            optimizers[0].param_groups[0]["lr"] = 5.0
            assert state.digest() != before
            state.restore()
            assert state.digest() == before
            assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("at_start", [None, 0.0, 3.0])
def test_gradients_are_none_or_zero_as_they_were(at_start: float | None) -> None:
    net, _, _, state = build()
    for parameter in net.parameters():
        parameter.grad = None if at_start is None else torch.full_like(parameter, at_start)
    kept = [parameter.grad for parameter in net.parameters()]
    state.snapshot()
    backward(net, 1)
    state.restore()
    for parameter, gradient in zip(net.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize("warm", [False, True])
def test_a_full_snapshot_undoes_updates(warm: bool) -> None:
    net, optimizers, _, state = build()
    if warm:
        backward(net, 0)
        for optimizer in optimizers:
            optimizer.step()
    backward(net, 1)
    before = state.digest()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    pointers = [parameter.data_ptr() for parameter in net.parameters()]
    for _ in range(2):
        state.snapshot(full=True)
        backward(net, 2)
        optimizers[0].step()
        state.restore()
        assert state.digest() == before
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))
    assert [parameter.data_ptr() for parameter in net.parameters()] == pointers


def test_a_scaler_can_unscale_again() -> None:
    net, optimizers, scaler, state = build(scaler=True)
    for number in range(3):
        state.snapshot()
        for attempt in range(2):
            scaler.scale(net(torch.ones(8, 4) * number).square().mean()).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if attempt == 0:
                state.restore()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert scaler.get_scale() > 16.0


def test_a_replaced_buffer_comes_back() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("seen", torch.zeros(1))
    state = TrackedState(net)
    state.snapshot()
    net.seen = torch.ones(3)
    state.restore()
    assert torch.equal(net.seen, torch.zeros(1))
