"""The gradient buckets of DistributedDataParallel modules, which all members of a module's group must have alike.

DDP forms its final buckets behind the first backward pass. A joiner whose rehearsal came to none has others than the
stayers: their gradients would be added to those of other parameters. So a joiner takes the buckets of the others. A
checkpoint holds them, too: where a gradient lies in its bucket decides in which order the ranks' parts are added.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from keepstep.errors import StateError
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.modules import Modules
from keepstep.training.plane import Lane
from keepstep.training.turning import smallest
from keepstep.training.work import DoneWork

__all__ = ["Bucketing", "GradientBuckets", "KeptBuckets"]

_log = logging.getLogger("keepstep")
_DIGEST_BITS = 31
_RANK_BITS = 20
_MOST = (1 << 31) - 1


class Bucketing(msgspec.Struct, frozen=True):
    """The parameters of each bucket of one module, by their numbers in it; none where torch does not tell them (sparse
    gradients). `final`: formed behind a backward pass, and never formed anew."""

    final: bool
    buckets: tuple[tuple[int, ...], ...]


class KeptBuckets(msgspec.Struct, frozen=True):
    """The final buckets of one module in a checkpoint, none as long as they are not final; `asked` is what the script
    had asked DDP for, by which they were formed."""

    asked: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...] = ()


class GradientBuckets:
    """Those of all tracked modules. `alone`: they were formed in a rehearsal, so those of others count for more."""

    def __init__(self, modules: Modules) -> None:
        self.alone = False
        self._modules = modules
        self._put: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[DistributedDataParallel, KeptBuckets] = weakref.WeakKeyDictionary()

    def form(self) -> None:
        """Let DDP form its final buckets now rather than at its next forward, without the others.

        What a backward pass left that an exception ended is forgotten.
        """
        for module in self._modules.data_parallel:
            _form(module)

    def now(self) -> tuple[Bucketing, ...]:
        """The buckets as they are, module by module."""
        return tuple(map(self._now, self._modules.data_parallel))

    def kept(self) -> tuple[KeptBuckets, ...]:
        """For a checkpoint, module by module. Final buckets stay as they are: they are asked for once."""
        return tuple(map(self._kept, self._modules.data_parallel))

    def go_on(self, kept: Sequence[KeptBuckets]) -> None:
        """After a checkpoint was loaded: modules that have none of their own yet get the final buckets that it holds,
        if the script asks DDP for the same as the one that wrote it."""
        for module, one in zip(self._modules.data_parallel, kept, strict=False):
            own = _read(module)
            same = one.asked == _asked(module) and _parameters(one.buckets) == _parameters(own.buckets)
            if own.final or not one.buckets or not same:
                continue
            try:
                self._take(module, Bucketing(True, one.buckets), own=own)
            except StateError as error:
                _log.warning("gradients are added in another order than before the checkpoint: %s", error)

    def take(self, given: Sequence[Bucketing]) -> None:
        """Go on with the buckets of another member of the same groups. Raises StateError if they do not fit."""
        own = self.now()
        if len(given) != len(own):
            raise StateError(f"gradient buckets of {len(given)} DDP modules, {len(own)} are tracked here")
        for module, now, wanted in zip(self._modules.data_parallel, own, given, strict=True):
            self._take(module, wanted, own=now)
        self.alone = False

    def agree(self) -> None:
        """Have the same buckets as all others of each module's group, who call this at the same boundary, behind
        `form`: where they differ, those of a stayer. A loss in between leaves the rest to the next call.

        Raises StateError where that cannot be.
        """
        for module in self._modules.data_parallel:
            group = module.process_group
            if not isinstance(group, KeepstepGroup) or group.size() == 1:
                continue
            if not self._agree(module, group.rank(), least=_smallest(group)):
                return
        self.alone = False

    def _agree(
        self, module: DistributedDataParallel, rank: int, *, least: Callable[[Sequence[int]], Sequence[int]]
    ) -> bool:
        """False where a loss came in between. `least` gives the smallest of each value over the module's group."""
        own = self._now(module)
        one, other = _digest(own)
        place = self.alone << (_RANK_BITS + 1) | (not own.final) << _RANK_BITS | rank
        votes = least((one, -one, other, -other, place))
        if not votes:
            return False
        if votes[0] == -votes[1] and votes[2] == -votes[3]:
            return True
        mine = votes[4] & ((1 << _RANK_BITS) - 1) == rank
        told = least(_numbers(own) if mine else [_MOST] * len(_numbers(own)))
        if told and not mine:
            self._take(module, _bucketing(told), own=own)
        return bool(told)

    def _now(self, module: DistributedDataParallel) -> Bucketing:
        """torch remembers what it told of final buckets, whatever they are later: where others were put in their place,
        or may yet be, it is asked while they are not final."""
        if not (module._has_rebuilt_buckets and (self.alone or module in self._put)):
            return _read(module)
        _reset(module)
        _put(module, now := Bucketing(True, _read(module).buckets))
        return now

    def _kept(self, module: DistributedDataParallel) -> KeptBuckets:
        if not module._has_rebuilt_buckets:
            return KeptBuckets(_asked(module))
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = KeptBuckets(_asked(module), self._now(module).buckets)
        return known

    def _take(self, module: DistributedDataParallel, wanted: Bucketing, *, own: Bucketing) -> None:
        if own == wanted:
            return
        self._known.pop(module, None)
        self._put.add(module)
        _put(module, wanted)
        if wanted.final:
            self._known[module] = KeptBuckets(_asked(module), wanted.buckets)


def _smallest(group: KeepstepGroup) -> Callable[[Sequence[int]], Sequence[int]]:
    ranks = tuple(dist.get_process_group_ranks(group))
    channel = group.fabric.channel(group.group_name, Lane.COLLECTIVE, ranks=ranks)
    return lambda values: smallest(channel, values)


def _digest(bucketing: Bucketing) -> tuple[int, int]:
    bits = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(bucketing))
    return bits & ((1 << _DIGEST_BITS) - 1), bits >> 33


def _numbers(bucketing: Bucketing) -> list[int]:
    """As a list whose length depends on the number of parameters alone."""
    flat = [number for bucket in bucketing.buckets for number in bucket]
    sizes = [len(bucket) for bucket in bucketing.buckets]
    return [int(bucketing.final), len(sizes), *flat, *sizes, *[0] * (len(flat) - len(sizes))]


def _bucketing(numbers: Sequence[int]) -> Bucketing:
    final, buckets, *rest = numbers
    at, found = 0, []
    for size in rest[len(rest) // 2 :][:buckets]:
        found.append(tuple(rest[at : at + size]))
        at += size
    return Bucketing(bool(final), tuple(found))


# ---------------------------------------------------------------------- DDP's reducer


def _asked(module: DistributedDataParallel) -> tuple[int, ...]:
    """What decides how torch forms buckets: sizes, and whether all parameters take part in every pass."""
    sizes = (module.bucket_bytes_cap, int(module.bucket_bytes_cap_default), *module.bucket_bytes_cap_list)
    return (int(module.find_unused_parameters), int(module.static_graph), *sizes)


def _parameters(buckets: Sequence[Sequence[int]]) -> list[int]:
    """The numbers of the parameters in all of them."""
    return sorted(number for bucket in buckets for number in bucket)


class _NoZeros(TorchDispatchMode):  # type: ignore[misc]
    """Whoever asks for the buckets gets zeros of their size, too: here, of no size."""

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.empty(0) if call is torch.ops.aten.zeros_like.default else call(*args, **(kwargs or {}))


class _Answering(ProcessGroup):  # type: ignore[misc]
    """A group whose broadcasts give what was `told`, one after the other, then what the own member has."""

    def __init__(self, told: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(0, 1)
        self._told = list(told)

    def broadcast(self, tensors: Sequence[torch.Tensor], options: object = None) -> Work:
        """The reducer asks twice: the parameters of all buckets and the number of buckets, then their sizes."""
        if self._told:
            tensors[0].copy_(torch.tensor(self._told.pop(0)))
        return DoneWork(list(tensors))


def _read(module: DistributedDataParallel) -> Bucketing:
    final = bool(module._has_rebuilt_buckets)
    try:
        with _NoZeros():
            filled = [bucket.parameters() for bucket in module.reducer._get_zeros_like_grad_buckets()]
    except RuntimeError:
        return Bucketing(final, ())
    held = {id(parameter) for parameters in filled for parameter in parameters}
    own = (parameter for parameter in module.module.parameters() if id(parameter) in held)
    numbers = {id(parameter): number for number, parameter in enumerate(own)}
    return Bucketing(final, tuple(tuple(numbers.get(id(one), -1) for one in parameters) for parameters in filled))


def _rebuild(module: DistributedDataParallel, told: Sequence[Sequence[int]] = ()) -> bool:
    """Let the reducer form its buckets; `told` is what it hears from rank 0."""
    group = _Answering(told)
    module.reducer._update_process_group(group)
    try:
        with torch.enable_grad():
            return bool(module.reducer._rebuild_buckets())
    finally:
        module.reducer._update_process_group(module.process_group)


def _reset(module: DistributedDataParallel) -> None:
    """A backward pass that did not end is forgotten, and so is that the buckets are final."""
    module.reducer._reset_state()
    module._has_rebuilt_buckets = False


def _form(module: DistributedDataParallel) -> None:
    try:
        if _rebuild(module):
            module._has_rebuilt_buckets = True
    except RuntimeError:  # torch's check: a backward pass did not end
        kept = _read(module)
        _reset(module)
        if kept.final:
            _put(module, kept)


def _put(module: DistributedDataParallel, wanted: Bucketing) -> None:
    """Put parameters into buckets as `wanted`. Raises StateError if these are not the buckets of such a module."""
    _reset(module)
    flat = [number for bucket in wanted.buckets for number in bucket]
    own = sum(map(len, _read(module).buckets))
    if sorted(flat) != list(range(own)) or not own:
        raise StateError(f"gradient buckets of {len(flat)} parameters do not fit a module of {own}")
    module.reducer._push_all_rebuilt_params()
    told = [*flat, len(wanted.buckets)], [len(bucket) for bucket in wanted.buckets]
    formed = _rebuild(module, told)
    _reset(module)
    if not formed or _read(module).buckets != wanted.buckets:
        raise StateError("the gradient buckets of the other members cannot be formed here")
    if wanted.final:
        module.reducer._push_all_rebuilt_params()
        module._has_rebuilt_buckets = _rebuild(module, told)
