"""One optimizer update, as another replica can make it: the hyper-parameters and the final gradients, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from keepstep.errors import StateError, TornRecord
from keepstep.training.memory import memory_of, viewable
from keepstep.training.optimizers import OptimizerState
from keepstep.training.redo import keep_place
from keepstep.training.sharding import local_of, placed_as
from keepstep.training.tree import dumps
from keepstep.training.treereader import loads

__all__ = ["NO_GRADIENT", "can_follow", "copy_gradients", "gradient_sizes", "hyper_parameters", "make_update", "room"]

_ALIGNED = 16
NO_GRADIENT = -1
"""Size of a gradient that is not there."""


def can_follow(optimizers: Sequence[Optimizer]) -> str:
    """Why no other process can make this member's updates from gradients; empty if one can."""
    if len(optimizers) != 1:
        return f"{len(optimizers)} optimizers"
    if type(optimizers[0]).__name__ == "ZeroRedundancyOptimizer":
        return "an optimizer whose update is a collective"
    if any(not viewable(local_of(parameter)) for parameter in _parameters(optimizers[0])):
        return "parameters that do not lie in host memory in order"
    return ""


def hyper_parameters(optimizer: Optimizer) -> bytes:
    """All groups of the optimizer without their parameters. Raises UnsupportedState for what cannot be carried."""
    return dumps(OptimizerState("optimizer", optimizer).groups())


def gradient_sizes(optimizer: Optimizer) -> tuple[int, ...]:
    """Bytes of the gradient (the local shard) of every parameter, in the order of the groups."""
    return tuple(
        NO_GRADIENT if p.grad is None else local_of(p.grad).numel() * local_of(p.grad).element_size()
        for p in _parameters(optimizer)
    )


def copy_gradients(optimizer: Optimizer, target: memoryview) -> None:
    """The bytes of all gradients, one behind the other, into `target`, which has room for them."""
    at = 0
    for parameter in _parameters(optimizer):
        if parameter.grad is None:
            continue
        local = local_of(parameter.grad).detach()
        source = memory_of(local if viewable(local) else local.cpu().contiguous())
        target[at : at + len(source)] = source
        at += _room(len(source))


def make_update(optimizer: Optimizer, *, groups: bytes, sizes: Sequence[int], gradients: bytearray) -> None:
    """Make the update that another member made with these. Its gradients are gone afterwards.

    Raises StateError where they do not fit this member, TornRecord for nonsense, and what the optimizer raises.
    """
    given = loads(groups)
    if not isinstance(given, list):
        raise TornRecord("not the groups of an optimizer")
    parameters = _parameters(optimizer)
    if len(parameters) != len(sizes) or room(sizes) != len(gradients):
        raise StateError(f"{len(sizes)} gradients for {len(parameters)} parameters")
    OptimizerState("optimizer", optimizer).adopt_groups(given, keep_place)
    at = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        parameter.grad = None
        if size != NO_GRADIENT:
            parameter.grad = _gradient(parameter, gradients, at=at, size=size)
            at += _room(size)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _gradient(parameter: torch.Tensor, data: bytearray, *, at: int, size: int) -> torch.Tensor:
    local = local_of(parameter)
    if local.numel() * local.element_size() != size:
        raise StateError(f"a gradient of {size} bytes for a parameter of {local.numel()} elements")
    flat = torch.frombuffer(data, dtype=local.dtype, count=local.numel(), offset=at) if size else local.new_empty(0)
    return placed_as(parameter, flat.view(local.shape))


def room(sizes: Sequence[int]) -> int:
    """Bytes that gradients of these sizes take, each begun at a multiple of 16."""
    return sum(_room(size) for size in sizes)


def _room(size: int) -> int:
    return (max(size, 0) + _ALIGNED - 1) // _ALIGNED * _ALIGNED


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
