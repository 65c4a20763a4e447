"""Buffers in which replicas were found to differ: each rank keeps its own values, as it does its random numbers.

Nobody makes them alike: BatchNorm's running values in a DDP module with `broadcast_buffers=False`. Once it is known
that they differ they are no part of what replicas compare. They go beside the state, and small ones are left with what
only this rank knows, so that its successor gets these and not those of the replica that gives the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keepstep.errors import StateError, TornRecord
from keepstep.training.extras import OWN_BYTES
from keepstep.training.modules import Buffer, Modules
from keepstep.training.sharding import is_distributed
from keepstep.training.tree import dumps
from keepstep.training.treereader import loads

__all__ = ["OwnBuffers"]


class OwnBuffers:
    """The own buffers of one member, by name; none until `note`."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._names: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def small(self) -> bool:
        """Whether a successor gets them where the rank's memory is gone."""
        return sum(one.tensor.numel() * one.tensor.element_size() for one in self._buffers()) <= OWN_BYTES

    def note(self, names: Iterable[str]) -> None:
        """Replicas differ in these. Shards stay what they are: state of the members that hold the same one."""
        found = set(names)
        whole = {one.name for one in self._modules.buffers if one.name in found and not is_distributed(one.tensor)}
        self._names |= whole

    def show(self) -> bytes:
        """What goes with the state to whoever takes it."""
        return dumps(self._values(), canonical=True) if self._names else b""

    @staticmethod
    def names(shown: bytes) -> frozenset[str]:
        """The buffers in what another member has shown. Raises TornRecord."""
        return frozenset(_checked(loads(shown))) if shown else frozenset()

    def take(self, shown: bytes) -> None:
        """Take over what another member has shown: its own buffers are those of this member, too, and no others.

        `become` may follow. Raises TornRecord, StateError.
        """
        values = _checked(loads(shown)) if shown else {}
        self._names = frozenset(values)
        self.become(values)

    def capture(self, most: int | None) -> dict[str, torch.Tensor]:
        """The values now; none where they are not small, or do not fit in `most` bytes."""
        if most is not None and not self.small:
            return {}
        values = self._values()
        return values if most is None or len(dumps(values)) <= most else {}

    def become(self, values: Any) -> None:
        """Take over the values of the rank that captured them; they are own ones from here on.

        Raises TornRecord for damaged data, StateError for buffers that are not there.
        """
        there = {one.name: one for one in self._modules.buffers}
        for name, value in _checked(values).items():
            if name not in there:
                raise StateError(
                    "a rank's own buffers hold one that is not there",
                    where=name,
                    remedy="start every member with the same script and arguments",
                )
            _put(there[name], value)
            self._names |= {name}

    def _buffers(self) -> list[Buffer]:
        return [one for one in self._modules.buffers if one.name in self._names]

    def _values(self) -> dict[str, torch.Tensor]:
        return {one.name: one.tensor.detach().resolve_conj().resolve_neg() for one in self._buffers()}


def _put(buffer: Buffer, value: torch.Tensor) -> None:
    """Into the tensor that is there, or another one where shape or type changed."""
    own = buffer.tensor
    if own.shape == value.shape and own.dtype == value.dtype:
        with torch.no_grad():
            own.copy_(value)
    else:
        buffer.replace(value.to(own.device))


def _checked(values: Any) -> Mapping[str, torch.Tensor]:
    if not (isinstance(values, dict) and all(isinstance(one, torch.Tensor) for one in values.values())):
        raise TornRecord("not the own buffers of a rank")
    return values
