"""What a step may change before it counts, kept so that the step can be done again from its start."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.training.modules import Modules, reset_fsdp
from keepstep.training.optimizers import OptimizerState
from keepstep.training.sharding import local_of

__all__ = ["Snapshot", "clone_tree", "keep_place"]

_LEAVES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


def clone_tree(value: Any, kept: Any = None) -> Any:
    """A deep copy; tensors are cloned without history, into the memory of an earlier copy `kept` where they fit."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is dict:
        have = kept if type(kept) is dict else {}
        return {key: clone_tree(one, have.get(key)) for key, one in value.items()}
    if kind is list or kind is tuple:
        parts = kept if type(kept) is kind and len(kept) == len(value) else [None] * len(value)
        return kind(clone_tree(one, part) for one, part in zip(value, parts, strict=True))
    if isinstance(value, torch.Tensor):
        if isinstance(kept, torch.Tensor) and _alike(kept, value):
            return kept.copy_(value.detach())
        return value.detach().clone()
    return copy.deepcopy(value)


class Snapshot:
    """Takes and restores the start of a step; the memory of the copies is used again for every step."""

    def __init__(self, modules: Modules, optimizers: list[OptimizerState], *, others: Mapping[str, Any]) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._others = others
        self._full = False
        self._buffers: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | bool] = []
        self._groups: list[Any] = []
        self._states: list[dict[Any, Any]] = []
        self._other_states: dict[str, Any] = {}

    @torch.no_grad()
    def take(self, *, full: bool) -> None:
        """Remember now. `full`: weights, gradients and optimizer state too."""
        self._full = full
        _copy_into(self._buffers, [buffer.tensor for buffer in self._modules.buffers])
        parameters = list(self._modules.parameters.values())
        if full:
            _copy_into(self._weights, [local_of(parameter) for parameter in parameters])
            self._gradients = [False if p.grad is None else p.grad.detach().clone() for p in parameters]
            earlier = self._states or [{} for _ in self._optimizers]
            self._states = [
                {key: clone_tree(value, have.get(key)) for key, value in one.holder.state.items()}
                for one, have in zip(self._optimizers, earlier, strict=True)
            ]
        else:
            self._gradients = [parameter.grad is not None for parameter in parameters]
        self._groups = [clone_tree(one.groups()) for one in self._optimizers]
        self._other_states = {name: clone_tree(other.state_dict()) for name, other in self._others.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to what `take` saw; may be called several times."""
        for root in self._modules.roots.values():
            reset_fsdp(root)
        for buffer, kept in zip(self._modules.buffers, self._buffers, strict=True):
            if _alike(buffer.tensor, kept):
                buffer.tensor.copy_(kept)
            else:
                buffer.replace(kept.clone())
        parameters = list(self._modules.parameters.values())
        if self._full:
            for parameter, weight in zip(parameters, self._weights, strict=True):
                local_of(parameter).copy_(weight)
            for one, state in zip(self._optimizers, self._states, strict=True):
                _restore_state(one.holder, state)
        self.restore_gradients()
        for one, groups in zip(self._optimizers, self._groups, strict=True):
            one.adopt_groups(groups, keep_place)
        for name, other in self._others.items():
            other.load_state_dict(clone_tree(self._other_states[name]))
            if hasattr(other, "_per_optimizer_states"):
                other._per_optimizer_states = defaultdict(_fresh_scaler_state)

    @torch.no_grad()
    def restore_gradients(self) -> None:
        """Make every gradient what it was when `take` ran: None, zero, or (full) its value."""
        for parameter, kept in zip(self._modules.parameters.values(), self._gradients, strict=True):
            if kept is False:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = kept.clone() if isinstance(kept, torch.Tensor) else torch.zeros_like(parameter)
            elif isinstance(kept, torch.Tensor):
                parameter.grad.detach().copy_(kept)
            else:
                local_of(parameter.grad).zero_()


def _fresh_scaler_state() -> dict[str, Any]:
    from torch.amp.grad_scaler import _refresh_per_optimizer_state

    return _refresh_per_optimizer_state()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy_into(kept: list[torch.Tensor], now: list[torch.Tensor]) -> None:
    """Copy `now` over the tensors in `kept`, which is made anew where it does not fit."""
    if len(kept) != len(now) or not all(map(_alike, kept, now)):
        kept[:] = [tensor.detach().clone() for tensor in now]
    elif now:
        torch._foreach_copy_(kept, now)


def keep_place(value: Any, existing: Any, *, parameter: torch.Tensor | None = None, where: str = "") -> Any:
    """A kept value; tensors go back into the one that is there."""
    if isinstance(value, torch.Tensor):
        if isinstance(existing, torch.Tensor) and _alike(existing, value):
            existing.copy_(value)
            return existing
        return value.clone()
    return clone_tree(value)


def _restore_state(optimizer: Optimizer, kept: dict[Any, Any]) -> None:
    """Optimizer state back in place; what was not there is removed."""
    for key in [key for key in optimizer.state if key not in kept]:
        del optimizer.state[key]
    for key, value in kept.items():
        own = optimizer.state[key]
        if not (isinstance(own, dict) and isinstance(value, dict)):
            optimizer.state[key] = clone_tree(value)
            continue
        for name in [name for name in own if name not in value]:
            del own[name]
        for name, one in value.items():
            own[name] = keep_place(one, own.get(name))
