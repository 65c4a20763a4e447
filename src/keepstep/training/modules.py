"""Parameters and buffers of the tracked modules, under names that do not depend on wrappers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import UsageError
from keepstep.training.sharding import coordinates, local_of

__all__ = [
    "Buffer",
    "Modules",
    "named_objects",
    "reset_fsdp",
]


@dataclass(frozen=True)
class Buffer:
    """A buffer by its place, since user code may put a new tensor there at any time."""

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor = self.owner._buffers[self.key]
        assert tensor is not None
        return tensor

    def replace(self, tensor: torch.Tensor) -> None:
        """Put another tensor there."""
        self.owner._buffers[self.key] = tensor


def named_objects(given: Any, *, single: str) -> dict[str, Any]:
    """`given` (None, one object, a list, tuple or dict) as a dict; one object is called `single`."""
    if given is None:
        return {}
    if isinstance(given, (list, tuple)):
        return {f"{single}.{index}" if len(given) > 1 else single: one for index, one in enumerate(given)}
    if isinstance(given, Mapping) and not isinstance(given, nn.Module):
        return {f"{single}.{name}": one for name, one in given.items()}
    return {single: given}


def _unwrap(model: Any) -> tuple[nn.Module, str]:
    """The module inside DDP, torch.compile and PipelineStage, and which pipeline stage it is."""
    stage = ""
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "submod", None), nn.Module):
        stage = f"stage{getattr(model, 'stage_index', 0)}"
        model = model.submod
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            break
    if not isinstance(model, nn.Module):
        raise UsageError(f"a tracked model is a {type(model).__name__}", remedy="track torch.nn.Module objects")
    return model, stage


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    """The FSDP2 modules inside `module`, outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield from (one for one in module.modules() if isinstance(one, fsdp.FSDPModule))


def reset_fsdp(module: nn.Module) -> None:
    """Forget what an interrupted step left in FSDP2: prefetches, training states and unreduced gradients."""
    for one in _fsdp_modules(module):
        state = one._get_fsdp_state()
        if state._is_root and hasattr(one, "reset_iter_state"):
            one.reset_iter_state()
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


class Modules:
    """The tracked modules, scanned once; `scan()` again after modules or parameters were added or replaced.

    `shared` are the DDP modules that take their buffers from rank 0, `data_parallel` all DDP modules, `unshared` the
    buffers that nobody makes alike on replicas.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        unwrapped = {name: _unwrap(model) for name, model in given.items()}
        self.roots = {name: module for name, (module, _) in unwrapped.items()}
        self._given = [model for model in given.values() if isinstance(model, nn.Module)]
        self._stages = {name: stage for name, (_, stage) in unwrapped.items() if stage}
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: list[Buffer] = []
        self.data_parallel: list[DistributedDataParallel] = []
        self.shared: list[DistributedDataParallel] = []
        self.unshared: list[Buffer] = []
        self.scan()

    def scan(self) -> None:
        """Find all parameters (sharded ones in their sharded form) and buffers; tied ones count once."""
        self.data_parallel = [
            one for given in self._given for one in given.modules() if isinstance(one, DistributedDataParallel)
        ]
        self.shared = [one for one in self.data_parallel if one.broadcast_buffers and list(one.module.buffers())]
        self.parameters = {}
        self.buffers = []
        seen: set[int] = set()
        for prefix, root in self.roots.items():
            for one in _fsdp_modules(root):
                one.reshard()
            for path, module in root.named_modules():
                for key, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        self.parameters[".".join(part for part in (prefix, path, key) if part)] = parameter
                for key, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        self.buffers.append(Buffer(".".join(part for part in (prefix, path, key) if part), module, key))
        taken = {
            id(buffer)
            for one in self.shared
            for name, buffer in one.module.named_buffers()
            if name not in one.parameters_to_ignore
        }
        self.unshared = [one for one in self.buffers if id(one.tensor) not in taken]

    def extra_states(self) -> dict[str, nn.Module]:
        """The modules that keep extra state (get_extra_state) beside tensors."""
        return {
            f"{prefix}.{path}" if path else prefix: module
            for prefix, root in self.roots.items()
            for path, module in root.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def names(self) -> dict[int, str]:
        """Parameter names by identity."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def identity(self) -> list[Any]:
        """What makes this member's modules a replica of another's: names, types, local shapes, shards, groups."""
        parts: list[Any] = [sorted(self._stages.items())]
        for name, parameter in self.parameters.items():
            local = local_of(parameter)
            parts.append((name, str(local.dtype), tuple(local.shape), coordinates(parameter)))
        parts.extend((buffer.name, str(buffer.tensor.dtype)) for buffer in self.buffers)
        if dist.is_initialized():
            parts.extend(tuple(dist.get_process_group_ranks(one.process_group)) for one in self.data_parallel)
        return parts
