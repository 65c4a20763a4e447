"""Where two states differ: the name of the first place, for a person to read."""

from __future__ import annotations

from typing import Any

from keepstep.errors import TornRecord
from keepstep.training.manifest import Manifest
from keepstep.training.tree import dumps
from keepstep.training.treereader import unpack

__all__ = ["first_difference"]

_Described = tuple[Manifest, bytes]


def first_difference(one: _Described, other: _Described) -> str:
    """The first entry (or place in the tree) in which two manifests with their chunk digests differ; "" if none."""
    names = _by_entry(one)
    others = _by_entry(other)
    for name, value in names.items():
        if others.get(name) != value:
            return name
    for name in others:
        if name not in names:
            return name
    try:
        trees = [unpack(manifest.tree, range(len(manifest.entries))) for manifest, _ in (one, other)]
    except TornRecord:
        return "tree"
    return _difference(trees[0], trees[1], path="")


def _by_entry(described: _Described) -> dict[str, tuple[Any, ...]]:
    """Type, shape and chunk digests by entry name."""
    manifest, digests = described
    found = {}
    at = 0
    counts = [0] * len(manifest.entries)
    for chunk in manifest.chunks():
        counts[chunk.entry] += 1
    for entry, count in zip(manifest.entries, counts, strict=True):
        found[entry.name] = (entry.dtype, entry.shape, digests[8 * at : 8 * (at + count)])
        at += count
    return found


def _difference(one: Any, other: Any, *, path: str) -> str:
    """The first path at which two trees differ."""
    if type(one) is type(other) is dict:
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                return f"{path}.{key}".lstrip(".")
            found = _difference(one[key], other[key], path=f"{path}.{key}")
            if found:
                return found
        return ""
    if type(one) is type(other) and isinstance(one, (list, tuple)) and len(one) == len(other):
        for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
            found = _difference(mine, yours, path=f"{path}[{index}]")
            if found:
                return found
        return ""
    return "" if type(one) is type(other) and _bytes(one) == _bytes(other) else path.lstrip(".")


def _bytes(value: Any) -> bytes:
    return dumps(vars(value)) if hasattr(value, "placements") else dumps(value)
