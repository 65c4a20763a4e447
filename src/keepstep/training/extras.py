"""Objects given to `job.track(extra=...)`: each rank keeps its own values, as it does its random numbers.

Nobody knows whether a value is meant to be the same on all ranks. So what one rank alone knows holds the values of its
extra objects, and its successor takes those, not the ones of the replica that gives the rest of the state. There is one
case in which they may be behind: they were left at an agreement, and the rank was lost before its step ended. If its
replica had the same values at that agreement, those that it has by now are taken.

Objects that are too large for it are part of the state that replicas share, and must be alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from keepstep.errors import StateError, TornRecord
from keepstep.training.memory import memory_of
from keepstep.training.optimizers import plain_tree
from keepstep.training.tree import Sharded, dumps, flatten
from keepstep.training.treereader import loads

__all__ = ["OWN_BYTES", "Extras"]

OWN_BYTES = 16 * 1024
"""An object whose state is larger than this must have the same values on all replicas."""
_BESIDE_BYTES = 256 * 1024  # up to this size values go beside the shared state, so that those of ranks can be compared
_KEPT = 3
_PER_VALUE = 16
_SHAPE: dict[str, type] = {"version": int, "exact": bool, "values": dict, "digests": dict}


@dataclass(frozen=True)
class _Taken:
    """What another member had: its values now, and their digests at its last agreements, by version."""

    values: dict[str, bytes] = field(default_factory=dict)
    agreed: dict[int, dict[str, bytes]] = field(default_factory=dict)


class Extras:
    """The extra objects of one member, by name.

    `large` says whether, at the last capture, there was any that must be alike on all replicas.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._agreed: dict[int, dict[str, bytes]] = {}
        self._taken = _Taken()
        self.large = False

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def shared(self) -> dict[str, Any]:
        """The states of those that are too large to go beside the state now, by name."""
        return {name: tree for name, tree in self._trees().items() if _size(tree) > _BESIDE_BYTES}

    def large_digest(self) -> tuple[bytes, tuple[str, ...]]:
        """Of those that must be alike on all replicas: a digest over their values, and their names; empty: none."""
        large = {name: tree for name, tree in self._trees().items() if _size(tree) > OWN_BYTES}
        return (_digest_of(large) if large else b"", tuple(large))

    def capture(self, version: int, *, counting: bool = False, most: int | None = None) -> dict[str, Any]:
        """The values now, which are those after `version` updates; `counting` as in `private.capture`.

        Of objects that do not fit in `most` bytes together, the largest are left out but for their digests.
        """
        values = self._values()
        digests = {name: _digest(value) for name, value in values.items()}
        if counting:
            self._agreed = {at: one for at, one in self._agreed.items() if version - _KEPT < at < version}
            self._agreed[version] = digests
        fit: dict[str, bytes] = {}
        own = {"version": version, "exact": not counting, "values": fit, "digests": digests}
        left = None if most is None else most - len(dumps(own))
        for name in sorted(values, key=lambda name: len(values[name])):
            if left is not None:
                left -= len(values[name]) + len(name.encode()) + _PER_VALUE
            if left is None or left >= 0:
                fit[name] = values[name]
        return own

    def show(self) -> bytes:
        """What goes with the state to whoever takes it."""
        return dumps({"values": self._values(), "agreed": self._agreed}) if self._objects else b""

    def names(self, shown: bytes) -> set[str]:
        """The objects in what another member has shown. Raises TornRecord."""
        return set(_taken(shown).values)

    def take(self, shown: bytes) -> None:
        """Take over the values that another member has shown; `become` may follow. Raises TornRecord."""
        self._taken = _taken(shown)
        for name, value in self._taken.values.items():
            self._load(name, value)

    def become(self, own: Any) -> None:
        """Take over the values of the rank that captured `own`, after `take`.

        Raises TornRecord for damaged data, StateError where its values are other ones than those that were taken, and
        too large to be in `own`.
        """
        if not (isinstance(own, dict) and all(isinstance(own.get(name), kind) for name, kind in _SHAPE.items())):
            raise TornRecord("not the extra objects of a rank")
        taken, self._taken = self._taken, _Taken()
        agreed = taken.agreed.get(own["version"], {})
        for name, digest in own["digests"].items():
            value = own["values"].get(name)
            there = _digest(taken.values[name]) if name in taken.values else self._digest_now(name)
            same = digest == (there if own["exact"] else agreed.get(name))
            if not same and value is None:
                raise StateError(
                    f"the {name} of this rank is lost: other ranks have other values, and its own were too large to be"
                    " kept with its random numbers",
                    where=name,
                    remedy=f"track values of one rank in at most {OWN_BYTES} bytes, or make them from rank and step",
                )
            if not same:
                self._load(name, value)

    def _trees(self) -> dict[str, Any]:
        return {name: plain_tree(one.state_dict()) for name, one in sorted(self._objects.items())}

    def _values(self) -> dict[str, bytes]:
        trees = self._trees()
        sizes = {name: _size(tree) for name, tree in trees.items()}
        self.large = any(size > OWN_BYTES for size in sizes.values())
        return {name: dumps(tree, canonical=True) for name, tree in trees.items() if sizes[name] <= _BESIDE_BYTES}

    def _digest_now(self, name: str) -> bytes:
        one = self._objects.get(name)
        return b"" if one is None else _digest(dumps(plain_tree(one.state_dict()), canonical=True))

    def _load(self, name: str, value: Any) -> None:
        if name not in self._objects or not isinstance(value, bytes):
            raise StateError(
                "the state and this member do not track the same objects",
                where=name,
                remedy="start every member with the same script and arguments",
            )
        self._objects[name].load_state_dict(loads(value))


def _taken(shown: bytes) -> _Taken:
    if not shown:
        return _Taken()
    state = loads(shown)
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in ("values", "agreed")):
        raise TornRecord("not the extra objects of a member")
    return _Taken(state["values"], state["agreed"])


def _digest(value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(value)


def _digest_of(tree: Any) -> bytes:
    """As `_digest`, of a large tree: its tensors are not copied where they lie in host memory."""
    packed, hasher = flatten(tree, canonical=True), xxhash.xxh3_128()
    hasher.update(packed.data)
    for tensor in packed.tensors:
        hasher.update(memory_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()))
    return hasher.digest()


def _size(tree: Any) -> int:
    """Bytes of a state; more than any bound where it has shards. Raises UnsupportedState."""
    packed = flatten(tree)
    nbytes = len(packed.data) + sum(tensor.numel() * tensor.element_size() for tensor in packed.tensors)
    return nbytes + (_BESIDE_BYTES + 1) * _has_shards(tree)


def _has_shards(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_has_shards, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(_has_shards, tree))
    return isinstance(tree, Sharded)
