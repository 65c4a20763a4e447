"""The training state of one member: what it consists of, its digest, and how a joiner takes it over."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from keepstep.errors import StateError, UsageError
from keepstep.training.adoption import Adoption
from keepstep.training.buckets import GradientBuckets
from keepstep.training.extras import Extras
from keepstep.training.manifest import Entry, Image, Manifest
from keepstep.training.memory import memory_of, viewable
from keepstep.training.modules import Modules, named_objects
from keepstep.training.optimizers import OptimizerState, plain_tree
from keepstep.training.own_buffers import OwnBuffers
from keepstep.training.redo import Snapshot
from keepstep.training.sharding import Meshes, local_of, sharded_of
from keepstep.training.tree import flatten

__all__ = ["TrackedState"]


class TrackedState:
    """Everything a replica shares: modules with all buffers, optimizers, schedulers, GradScaler, large extra objects.

    Each of `model`, `optimizers`, `schedulers` and `extra` is None, one object, or a list, tuple or dict of objects.
    `role` goes into the replica key; it is needed only where members hold modules of equal names and shapes that are
    no replicas of each other. Small extra objects are each rank's own (`extras`), and so are buffers in which replicas
    were found to differ (`own_buffers`). Raises UsageError for objects that keep no state.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Any = None,
        *,
        schedulers: Any = None,
        scaler: Any = None,
        extra: Any = None,
        role: str = "",
    ) -> None:
        extras = named_objects(extra, single="extra")
        models = named_objects(model, single="model")
        models.update({name: one for name, one in extras.items() if isinstance(one, nn.Module)})
        self._modules = Modules(models)
        given = named_objects(optimizers, single="optimizer")
        self.optimizers: dict[str, Optimizer] = {n: one for n, one in given.items() if isinstance(one, Optimizer)}
        self._optimizers = [OptimizerState(name, one) for name, one in self.optimizers.items()]
        self._others: dict[str, Any] = {n: one for n, one in given.items() if n not in self.optimizers}
        self._others.update(named_objects(schedulers, single="scheduler"))
        self._others.update(named_objects(scaler, single="scaler"))
        others = {name: one for name, one in extras.items() if not isinstance(one, nn.Module)}
        self._others.update(others)
        for name, one in self._others.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise UsageError(
                    f"{name} is a {type(one).__name__} without state_dict() and load_state_dict()",
                    remedy="track objects that can give and take their state",
                )
        self.extras = Extras(others)
        self.own_buffers = OwnBuffers(self._modules)
        self._role = role
        self._adoption: Adoption | None = None
        self._beside = self._buffers_beside = b""
        self.gradient_buckets = GradientBuckets(self._modules)
        self._snapshot = Snapshot(self._modules, self._optimizers, others=self._others)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The tracked modules without wrappers, by name."""
        return self._modules.roots

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, sharded ones in their sharded form."""
        return self._modules.parameters

    @property
    def optimizer_states(self) -> dict[str, OptimizerState]:
        """The optimizers by name."""
        return {one.name: one for one in self._optimizers}

    def other_states(self) -> dict[str, Any]:
        """The state dicts of schedulers, scaler and extra objects, by name."""
        return self._states()

    def _states(self, *, without: Container[str] = ()) -> dict[str, Any]:
        return {name: plain_tree(one.state_dict()) for name, one in self._others.items() if name not in without}

    @property
    def taking(self) -> bool:
        """True between `adopt` and `adopted`: the state is partly somebody else's."""
        return self._adoption is not None

    def replica_key(self) -> str:
        """Names the set of members that hold this same state (hex).

        From names, types and local shapes of the parameters, the coordinates of their shards, which parameters the
        optimizers hold, the ranks of data-parallel groups, and the role. Not from optimizer state, so that a joiner
        that has none yet gets the key of its replicas.
        """
        self._modules.scan()
        return self._replica_key()

    def _replica_key(self) -> str:
        names = self._modules.names()
        held = [(one.name, [place for place, _ in one.positions(names)]) for one in self._optimizers]
        parts = (self._role, self._modules.identity(), held, sorted(self._others))
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())

    def image(self, *, whole: bool = False) -> Image:
        """The state as it is now, to be used while it stands still. `whole`: the rank's own extra objects and buffers
        are part of it (of its digest, too); otherwise they go beside it.

        Raises UnsupportedState naming what cannot be carried.
        """
        packed = flatten(self._tree(whole=whole), canonical=True)
        tensors = [_readable(tensor) for tensor in packed.tensors]
        entries = tuple(
            Entry(path, str(t.dtype)[6:], tuple(t.shape), t.numel() * t.element_size(), t.device.type)
            for path, t in zip(packed.paths, packed.tensors, strict=True)
        )
        beside = (b"", b"") if whole else (self.extras.show(), self.own_buffers.show())
        manifest = Manifest(entries, packed.data, self._replica_key(), *beside)
        return Image(manifest, [memory_of(tensor) for tensor in tensors], keep=tensors)

    def layout(self) -> Manifest:
        """The manifest of the state as it is now."""
        return self.image().manifest

    def buffers(self) -> list[memoryview]:
        """Views on the bytes of every entry, in the order of the manifest; the state keeps the memory alive."""
        return self.image().buffers

    def digest(self) -> str:
        """The digest (32 hex digits) of the state as it is now; equal for replicas."""
        return self.image().digest

    def adopt(self, manifest: Manifest) -> list[memoryview]:
        """Take the shape of `manifest`; the writable views, in its order, are where the bytes go.

        Raises StateError naming the first thing that does not fit this member. May be called again.
        """
        self._modules.scan()
        adoption = Adoption(manifest, meshes=Meshes(self._modules.parameters.values()))
        self._check_parts(adoption.tree, self.extras.names(manifest.extra))
        self._beside, self._buffers_beside = manifest.extra, manifest.buffers
        buffers_beside = self.own_buffers.names(manifest.buffers)
        adoption.take_parameters(self._modules.parameters)
        adoption.take_buffers([one for one in self._modules.buffers if one.name not in buffers_beside])
        names = self._modules.names()
        for one in self._optimizers:
            one.adopt(adoption.tree["optimizers"][one.name], names, realize=adoption.realize)
        for part in ("others", "module_extra"):
            adoption.tree[part] = {n: adoption.realize(v, None, where=n) for n, v in adoption.tree[part].items()}
        self._adoption = adoption
        return adoption.buffers()

    def adopted(self) -> None:
        """The bytes are there: finish with schedulers, scaler, extra objects and staged tensors."""
        adoption = self._adoption
        if adoption is None:
            raise StateError("no state is being taken", remedy="call adopt() first")
        adoption.finish()
        for name, value in adoption.tree["others"].items():
            self._others[name].load_state_dict(value)
        self.extras.take(self._beside)
        self.own_buffers.take(self._buffers_beside)
        for name, module in self._modules.extra_states().items():
            module.set_extra_state(adoption.tree["module_extra"][name])
        self._adoption = None

    def snapshot(self, *, full: bool = False) -> None:
        """Remember the start of a step.

        Cheap: buffers, hyper-parameters, scheduler, scaler and extra state, and which gradients were there.
        `full`: weights, gradients and optimizer state too, needed where one optimizer may have stepped before the
        step counts.
        """
        self._snapshot.take(full=full)

    def restore(self) -> None:
        """Back to the last snapshot. Gradients that were None become None, others zero (full: their values)."""
        self._snapshot.restore()

    def restore_gradients(self) -> None:
        """Gradients alone back to the last snapshot: a step that counts leaves none behind."""
        self._snapshot.restore_gradients()

    @property
    def has_shared_buffers(self) -> bool:
        """True where `sync_buffers` has something to do; equal on all members."""
        return bool(self._modules.shared)

    def sync_buffers(self) -> None:
        """Take the buffers of DDP modules from their rank 0 (a collective; to be called before the agreement).

        DDP does the same at the next forward. Done here, replicas are equal at the step boundary, and what rank 0
        counted (BatchNorm) does not die with it. Nothing happens without DDP buffers.
        """
        for module in self._modules.shared:
            module._sync_buffers()

    @property
    def has_unshared_buffers(self) -> bool:
        """Whether there are buffers that nobody makes alike on replicas, as of the last scan."""
        return bool(self._modules.unshared)

    def unshared_buffers(self) -> dict[str, bytes]:
        """XXH3 of each buffer that nobody makes alike on replicas, by name, in the order of the modules."""
        return {
            one.name: xxhash.xxh3_128_digest(memory_of(_readable(local_of(one.tensor))))
            for one in self._modules.unshared
        }

    def weights_sha256(self) -> str:
        """SHA-256 (hex) over names, types, shapes and bytes of all parameters and buffers (local shards)."""
        self._modules.scan()
        named: dict[str, torch.Tensor] = {name: local_of(one) for name, one in self._modules.parameters.items()}
        named.update({buffer.name: buffer.tensor for buffer in self._modules.buffers})
        hasher = hashlib.sha256()
        for name in sorted(named):
            tensor = _readable(named[name])
            hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            hasher.update(memory_of(tensor))
        return hasher.hexdigest()

    def parameter_digest(self) -> str:
        """XXH3 (hex) over names and bytes of all parameters (local shards): quick, and equal for equal replicas."""
        self._modules.scan()
        hasher = xxhash.xxh3_128()
        for name, parameter in sorted(self._modules.parameters.items()):
            hasher.update(name.encode())
            hasher.update(memory_of(_readable(local_of(parameter))))
        return hasher.hexdigest()

    def _tree(self, *, whole: bool) -> dict[str, Any]:
        """The state as one tree; `whole`: with the rank's own extra objects and buffers."""
        others = self.other_states() if whole else {**self._states(without=self.extras), **self.extras.shared()}
        self._modules.scan()
        names = self._modules.names()
        own: Container[str] = () if whole else self.own_buffers
        buffers = [one for one in self._modules.buffers if one.name not in own]
        return {
            "parameters": {name: sharded_of(one) for name, one in self._modules.parameters.items()},
            "buffers": {buffer.name: sharded_of(buffer.tensor) for buffer in buffers},
            "module_extra": {n: plain_tree(one.get_extra_state()) for n, one in self._modules.extra_states().items()},
            "optimizers": {one.name: one.tree(names) for one in self._optimizers},
            "others": others,
        }

    def _check_parts(self, tree: dict[str, Any], beside: set[str]) -> None:
        """The state, with the objects `beside` it, must hold the same objects as this member."""
        for part, own in (
            ("optimizers", set(self.optimizers)),
            ("others", set(self._others) - beside),
            ("module_extra", set(self._modules.extra_states())),
        ):
            different = sorted(set(tree.get(part, ())) ^ own)
            if different:
                raise StateError(
                    "the state and this member do not track the same objects",
                    where=different[0],
                    remedy="start every member with the same script and arguments",
                )


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its bytes lie in host memory in order, else a copy that does."""
    if viewable(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
