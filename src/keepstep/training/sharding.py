"""Distributed tensors seen from one member: local part, placements, and the coordinates that say which shard it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import StateError
from keepstep.training.tree import Sharded

__all__ = ["Meshes", "coordinates", "forget_meshes", "is_distributed", "local_of", "placed_as", "sharded_of"]


def _api() -> Any:
    """torch.distributed.tensor where somebody imported it (else there is no distributed tensor), or None."""
    return sys.modules.get("torch.distributed.tensor")


def is_distributed(tensor: Any) -> bool:
    """True for a DTensor."""
    api = _api()
    return api is not None and isinstance(tensor, api.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """The part of `tensor` that this member holds: the tensor itself unless it is distributed."""
    local = tensor._local_tensor if is_distributed(tensor) else tensor
    assert isinstance(local, torch.Tensor)
    return local


def placed_as(tensor: Any, local: torch.Tensor) -> Any:
    """`local` as the part this member holds of a tensor placed like `tensor`; itself unless that is distributed."""
    if not is_distributed(tensor):
        return local
    place = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return _api().DTensor.from_local(local, tensor.device_mesh, tensor.placements, **place)


def sharded_of(tensor: Any) -> Any:
    """A distributed tensor as Sharded (not copied); any other value as it is."""
    if not is_distributed(tensor):
        return tensor
    placements = tuple(_placement(placement) for placement in tensor.placements)
    return Sharded(
        local_of(tensor), placements, tuple(tensor.shape), tuple(tensor.stride()), _mesh_key(tensor.device_mesh)
    )


def coordinates(tensor: Any) -> tuple[tuple[str, int], ...]:
    """Which shard this member holds: one (placement, coordinate) for each mesh dimension that is not replicated.

    The coordinates come from the rank of this process, not from the mesh, which may be cached from an earlier rank.
    """
    if not is_distributed(tensor):
        return ()
    place = (tensor.device_mesh.mesh == dist.get_rank()).nonzero().tolist()
    if len(place) != 1:
        return (("outside", 0),)
    api = _api()
    return tuple(
        (str(placement), at)
        for placement, at in zip(tensor.placements, place[0], strict=True)
        if not isinstance(placement, api.Replicate)
    )


def forget_meshes() -> None:
    """Drop torch's caches of sharding decisions, which hold device meshes with the rank they were made under.

    To be called where a process takes another rank: else new distributed tensors get an old mesh.
    """
    if _api() is not None:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _placement(placement: Any) -> tuple[Any, ...]:
    """A placement as plain values."""
    if hasattr(placement, "split_factor"):
        return ("strided", int(placement.dim), int(placement.split_factor))
    if hasattr(placement, "dim"):
        return ("shard", int(placement.dim))
    if hasattr(placement, "reduce_op"):
        return ("partial", str(placement.reduce_op))
    return ("replicate",)


def _placed(plain: tuple[Any, ...]) -> Any:
    """The placement with these plain values."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind, *values = plain
    if kind == "strided":
        return _StridedShard(values[0], split_factor=values[1])
    return {"shard": Shard, "partial": Partial, "replicate": Replicate}[kind](*values)


def _mesh_key(mesh: Any) -> tuple[Any, ...]:
    names = mesh.mesh_dim_names
    return (None if names is None else tuple(names), tuple(mesh.mesh.shape))


class Meshes:
    """The device meshes a member knows, found by dimension names and sizes."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        meshes = [tensor.device_mesh for tensor in tensors if is_distributed(tensor)]
        self._known = {_mesh_key(mesh): mesh for mesh in meshes}

    def rebuild(self, sharded: Sharded, local: torch.Tensor, *, where: str) -> Any:
        """The distributed tensor described by `sharded`, over `local`. Raises StateError if its mesh is unknown."""
        from torch.distributed.tensor import DTensor

        mesh = self._known.get(sharded.mesh)
        if mesh is None:
            raise StateError(f"a distributed tensor lives on the unknown mesh {sharded.mesh}", where=where)
        return DTensor.from_local(
            local,
            mesh,
            [_placed(placement) for placement in sharded.placements],
            run_check=False,
            shape=torch.Size(sharded.shape),
            stride=sharded.stride,
        )
