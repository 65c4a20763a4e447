"""A joiner takes the shape of a state: for every entry of the manifest a place in memory where its bytes go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepstep.errors import StateError
from keepstep.training.manifest import Entry, Manifest
from keepstep.training.memory import memory_of, viewable
from keepstep.training.modules import Buffer
from keepstep.training.sharding import Meshes, is_distributed, local_of, sharded_of
from keepstep.training.tree import Sharded
from keepstep.training.treereader import unpack

__all__ = ["Adoption"]


@dataclass(frozen=True)
class _Slot:
    """Stands in the unpacked tree for the tensor with this number."""

    number: int


class Adoption:
    """One state being taken. `tree` is the unpacked tree, with slots where tensors belong."""

    def __init__(self, manifest: Manifest, *, meshes: Meshes) -> None:
        self._entries = manifest.entries
        self._meshes = meshes
        self._targets: list[torch.Tensor | None] = [None] * len(manifest.entries)
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.tree: dict[str, Any] = unpack(manifest.tree, [_Slot(number) for number in range(len(manifest.entries))])
        if not isinstance(self.tree, dict):
            raise StateError("a state manifest holds no state")

    def take_parameters(self, own: Mapping[str, nn.Parameter]) -> None:
        """Every parameter goes to the own one of its name. Raises StateError naming the first that differs."""
        given = self.tree["parameters"]
        _same_names(given, own, what="parameter")
        for name, value in given.items():
            self._into(value, own[name], name=name)

    def take_buffers(self, own: list[Buffer]) -> None:
        """Every buffer goes to the own one of its name, or replaces it where its shape or type changed."""
        given = self.tree["buffers"]
        buffers = {buffer.name: buffer for buffer in own}
        _same_names(given, buffers, what="buffer")
        for name, value in given.items():
            tensor = self.realize(value, buffers[name].tensor, where=name)
            if tensor is not buffers[name].tensor:
                buffers[name].replace(tensor)

    def realize(self, value: Any, existing: Any, *, parameter: torch.Tensor | None = None, where: str = "") -> Any:
        """`value` with slots replaced by tensors: the `existing` one where it fits, else a new one.

        A new tensor lies on the device of `parameter` if the original was not on a CPU.
        """
        if isinstance(value, _Slot):
            return self._tensor(value.number, existing, parameter=parameter)
        if isinstance(value, Sharded):
            fits = is_distributed(existing) and _same_place(value, sharded_of(existing))
            own_local = local_of(existing) if fits else None
            local = self._tensor(value.local.number, own_local, parameter=parameter)  # type: ignore[attr-defined]
            if local is own_local:
                return existing
            return self._meshes.rebuild(value, local, where=where)
        kind = type(value)
        if kind is dict:
            own = existing if isinstance(existing, dict) else {}
            return {
                key: self.realize(one, own.get(key), parameter=parameter, where=f"{where}.{key}")
                for key, one in value.items()
            }
        if kind is list or kind is tuple:
            own_items = existing if isinstance(existing, kind) and len(existing) == len(value) else [None] * len(value)
            return kind(
                self.realize(one, have, parameter=parameter, where=f"{where}[{index}]")
                for index, (one, have) in enumerate(zip(value, own_items, strict=True))
            )
        return value

    def buffers(self) -> list[memoryview]:
        """Writable views, one for each entry in order; tensors that cannot be written in place get a staging copy."""
        views = []
        for entry, target in zip(self._entries, self._targets, strict=True):
            if target is None:
                raise StateError("a state manifest has an entry that nothing refers to", where=entry.name)
            if not viewable(target):
                staging = torch.empty(tuple(target.shape), dtype=target.dtype)
                self._staged.append((target, staging))
                target = staging
            views.append(memory_of(target))
        return views

    def finish(self) -> None:
        """Copy staged tensors to their places."""
        with torch.no_grad():
            for target, staging in self._staged:
                target.copy_(staging)
        self._staged.clear()

    def _into(self, value: Any, own: torch.Tensor, *, name: str) -> None:
        """The bytes of one parameter go to `own`, which must have the same type, shape and shard."""
        if isinstance(value, Sharded) != is_distributed(own):
            raise StateError("a parameter is sharded on one side only", where=name)
        if isinstance(value, Sharded):
            if not _same_place(value, sharded_of(own)):
                raise StateError(f"a parameter is sharded as {value.placements} over {value.mesh}", where=name)
            value = value.local
        local = local_of(own)
        if not _fits(self._entries[value.number], local):
            entry = self._entries[value.number]
            raise StateError(
                f"a parameter is {entry.dtype}{list(entry.shape)} in the state and "
                f"{str(local.dtype)[6:]}{list(local.shape)} here",
                where=name,
                remedy="start every member with the same script and arguments",
            )
        self._targets[value.number] = local

    def _tensor(self, number: int, existing: Any, *, parameter: torch.Tensor | None) -> torch.Tensor:
        """The tensor for entry `number`."""
        entry = self._entries[number]
        known = self._targets[number]
        if known is None and type(existing) in (torch.Tensor, nn.Parameter, nn.Buffer) and _fits(entry, existing):
            known = existing
        if known is None:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise StateError(f"a state holds the unknown type {entry.dtype}", where=entry.name)
            device = torch.device("cpu")
            if entry.device != "cpu" and parameter is not None:
                device = local_of(parameter).device
            known = torch.empty(entry.shape, dtype=dtype, device=device)
            if known.numel() * known.element_size() != entry.nbytes:
                raise StateError(f"a state announces {entry.nbytes} bytes for {list(entry.shape)}", where=entry.name)
        self._targets[number] = known
        return known


def _fits(entry: Entry, tensor: torch.Tensor) -> bool:
    return (
        str(tensor.dtype)[6:] == entry.dtype
        and tuple(tensor.shape) == entry.shape
        and tensor.numel() * tensor.element_size() == entry.nbytes
    )


def _same_place(given: Sharded, own: Sharded) -> bool:
    return (given.placements, given.shape, given.mesh) == (own.placements, own.shape, own.mesh)


def _same_names(given: Mapping[str, Any], own: Mapping[str, Any], *, what: str) -> None:
    for name in given:
        if name not in own:
            raise StateError(f"the state has a {what} that is not there", where=name)
    for name in own:
        if name not in given:
            raise StateError(f"the state lacks a {what}", where=name)
