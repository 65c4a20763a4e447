"""State of optimizers, bit exact and in place, by the position of each parameter in the parameter groups.

`Optimizer.load_state_dict` is not used: it casts state to the type of the parameter and replaces tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from keepstep.errors import StateError
from keepstep.training.sharding import sharded_of

__all__ = ["OptimizerState", "plain_tree"]


class _Realize(Protocol):
    """Makes a value of this member out of one of a tree, in the place of an existing one where that fits."""

    def __call__(self, value: Any, existing: Any, *, parameter: torch.Tensor | None = None, where: str = "") -> Any:
        """The value."""


def plain_tree(value: Any) -> Any:
    """The tree with distributed tensors replaced by Sharded; containers are new, tensors are not copied."""
    kind = type(value)
    if kind is dict:
        return {key: plain_tree(one) for key, one in value.items()}
    if kind is list or kind is tuple:
        return kind(plain_tree(one) for one in value)
    return sharded_of(value)


class OptimizerState:
    """One optimizer, seen as a tree: `groups` (hyper-parameters) and `state` by `position:name` of the parameter."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer
        zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        self.holder: Optimizer = getattr(optimizer, "optim") if zero else optimizer  # noqa: B009

    def positions(self, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """`position:name` and parameter, in the order of the groups; `names` are by identity of the parameter."""
        position = 0
        for group in self.holder.param_groups:
            for parameter in group["params"]:
                yield f"{position}:{names.get(id(parameter), '?')}", parameter
                position += 1

    def groups(self) -> list[dict[str, Any]]:
        """The hyper-parameters of every group (not copied)."""
        return [
            {key: plain_tree(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def tree(self, names: dict[int, str]) -> dict[str, Any]:
        """The whole state; parameters without state are left out."""
        state = self.holder.state
        found: dict[Any, Any] = {}
        for place, parameter in self.positions(names):
            if parameter in state:
                found[place] = plain_tree(dict(state[parameter]))
        other = {key: plain_tree(value) for key, value in state.items() if not isinstance(key, torch.Tensor)}
        return {"groups": self.groups(), "state": found, "other": other}

    def adopt(self, tree: dict[str, Any], names: dict[int, str], *, realize: _Realize) -> None:
        """Take the shape of `tree`: existing tensors stay where they fit, others are made by `realize`."""
        self.adopt_groups(tree["groups"], realize)
        state = self.holder.state
        positions = dict(self.positions(names))
        unknown = [place for place in tree["state"] if place not in positions]
        if unknown:
            raise StateError(f"{self.name} has no parameter {unknown[0]}", where=self.name)
        for place, parameter in positions.items():
            if place not in tree["state"]:
                state.pop(parameter, None)
                continue
            own = state[parameter]
            given = tree["state"][place]
            for key in [key for key in own if key not in given]:
                del own[key]
            for key, value in given.items():
                where = f"{self.name}.state.{place}.{key}"
                own[key] = realize(value, own.get(key), parameter=parameter, where=where)
        for key in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[key]
        state.update({key: realize(value, None, where=f"{self.name}.{key}") for key, value in tree["other"].items()})

    def adopt_groups(self, groups: list[dict[str, Any]], realize: _Realize) -> None:
        """Set the hyper-parameters of every group; a tensor (such as a learning rate) keeps its place."""
        if len(groups) != len(self.optimizer.param_groups):
            raise StateError(
                f"{self.name} has {len(self.optimizer.param_groups)} parameter groups, the state has {len(groups)}",
                where=self.name,
            )
        for index, (own, given) in enumerate(zip(self.optimizer.param_groups, groups, strict=True)):
            for key in [key for key in own if key != "params" and key not in given]:
                del own[key]
            for key, value in given.items():
                own[key] = realize(value, own.get(key), where=f"{self.name}.groups[{index}].{key}")
