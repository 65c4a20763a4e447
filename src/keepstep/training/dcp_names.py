"""The names a state has for `torch.distributed.checkpoint`: those of `{"model": ..., "optimizer": ...}` with the state
dicts of `torch.distributed.checkpoint.state_dict`, so that a script without keepstep loads it under its own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from keepstep.training.manifest import Manifest
from keepstep.training.sharding import is_distributed, local_of
from keepstep.training.state import TrackedState

__all__ = ["Described", "Part", "Value", "describe"]

_STATE = re.compile(r"optimizers\.(?P<optimizer>.*?)\.state\.\d+:(?P<rest>.*)")
_GROUP = re.compile(r"optimizers\.(?P<optimizer>.*?)\.groups\[(?P<index>\d+)\]\.(?P<rest>.*)")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one entry is a part of: the tensor `name` of `size`, from `offsets` on."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """A value that is no tensor: its `name` and the `path` in nested dicts and lists that the name stands for."""

    name: str
    path: tuple[str | int, ...]


class Described(msgspec.Struct, frozen=True):
    """Parts by name of the entry of the manifest, and values with what they are."""

    parts: dict[str, Part]
    values: list[tuple[Value, Any]]


def describe(tracked: TrackedState, manifest: Manifest) -> Described:
    """The names of everything in `tracked` now, which `manifest` lists; for shards also their place in the whole."""
    roots = sorted(tracked.modules, key=len, reverse=True)
    shards = dict(_shards(tracked))
    parts = {}
    for entry in manifest.entries:
        size, offsets = shards.get(entry.name, (entry.shape, (0,) * len(entry.shape)))
        parts[entry.name] = Part(_name_of(entry.name.removesuffix("[0]"), roots), size, offsets)
    return Described(parts, list(_values(tracked, roots)))


def _name_of(entry: str, roots: list[str]) -> str:
    state, group = _STATE.fullmatch(entry), _GROUP.fullmatch(entry)
    if state:
        return f"{state['optimizer']}.state.{_without_root(state['rest'], roots)}"
    if group:
        return f"{group['optimizer']}.param_groups.{group['index']}.{group['rest']}"
    kind, _, rest = entry.partition(".")
    return rest if kind in ("parameters", "buffers", "others") else f"{kind}.{rest}"


def _without_root(name: str, roots: list[str]) -> str:
    """Optimizers name parameters as the model does, without the name under which the model was tracked."""
    return next((name.removeprefix(f"{root}.") for root in roots if name.startswith(f"{root}.")), name)


def _shards(tracked: TrackedState) -> Iterable[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Whole size and own offsets of every distributed tensor, by the name of its entry."""
    parameters = tracked.parameters
    for name, parameter in parameters.items():
        if is_distributed(parameter):
            yield f"parameters.{name}[0]", _place(parameter)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for key, optimizer in tracked.optimizer_states.items():
        for position, parameter in optimizer.positions(names):
            for what, value in optimizer.holder.state.get(parameter, {}).items():
                if is_distributed(value):
                    yield f"optimizers.{key}.state.{position}.{what}[0]", _place(value)


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), tuple(offsets)[: local_of(tensor).dim()]


def _values(tracked: TrackedState, roots: list[str]) -> Iterable[tuple[Value, Any]]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    names = {id(parameter): name for name, parameter in tracked.parameters.items()}
    nested: dict[str, Any] = dict(tracked.other_states())
    for key, optimizer in tracked.optimizer_states.items():
        groups = []
        for group in optimizer.holder.param_groups:
            held = [_without_root(names.get(id(one), "?"), roots) for one in group["params"]]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": held})
        nested[key] = {"param_groups": groups}
    flat, paths = flatten_state_dict(nested)
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            yield Value(name, tuple(paths[name])), value
