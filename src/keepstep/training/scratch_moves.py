"""What removes, renames and links files in two layers: the world's stay, what is there for the script changes."""

from __future__ import annotations

import errno
from typing import Any

from keepstep.training.scratch_layers import REAL, Layers, directory_at, fault, there

__all__ = ["linked", "received", "removed", "renamed"]


def removed(layers: Layers, path: str, *, given: Any, directory: bool) -> bool:
    """Remove the file, or the empty `directory`, at `path`. True where something of the world is kept from that.

    Raises OSError as the system does.
    """
    place = layers.physical(path)
    if place is None:
        raise fault(errno.ENOENT, given)
    if directory_at(place) is not directory:
        raise fault(errno.ENOTDIR if directory else errno.EISDIR, given)
    _clear(layers, path, given=(given,), directory=directory)
    lower = layers.lower(path)
    kept = lower is not None and there(lower)
    layers.hide(path)
    return kept


def renamed(layers: Layers, source: str, *, target: str, given: tuple[Any, Any]) -> bool:
    """Give `source` the name `target`. True where something of the world is kept from that. Raises OSError."""
    place = layers.physical(source)
    if place is None:
        raise fault(errno.ENOENT, *given)
    if source == target:
        return False
    directory = directory_at(place)
    if target.startswith(source + "/"):
        raise fault(errno.EINVAL, *given)
    _make_room(layers, target, given=given, directory=directory)
    upper, lower, inside = layers.upper(source), layers.lower(source), layers.moves_inside(source)
    kept = lower is not None and there(lower)
    whole = there(upper)
    layers.hide(target)
    if whole:
        REAL.rename(upper, layers.upper(target))
    if kept and (directory or not whole):
        layers.show(target, lower)
    for rest, moved in inside.items():
        layers.show(target + rest, moved)
    layers.hide(source)
    return kept


def received(layers: Layers, target: str, *, given: tuple[Any, Any], directory: bool) -> str:
    """The place for something that comes from outside of the layers and shall be `target`. Raises OSError."""
    _make_room(layers, target, given=given, directory=directory)
    layers.hide(target)
    return layers.upper(target)


def linked(layers: Layers, source: str, *, target: str, given: tuple[Any, Any]) -> None:
    """Give the file `source` a second name. Raises OSError."""
    place = layers.physical(source)
    if place is None:
        raise fault(errno.ENOENT, *given)
    if layers.physical(target) is not None:
        raise fault(errno.EEXIST, *given)
    if directory_at(place):
        raise fault(errno.EPERM, *given)
    layers.enter_parent(target, given[1])
    if place == layers.upper(source):
        REAL.link(place, layers.upper(target))
    else:
        layers.show(target, place)


def _make_room(layers: Layers, target: str, *, given: tuple[Any, Any], directory: bool) -> None:
    """What is at `target` gives way to another file or `directory`, as far as the system would let it."""
    layers.enter_parent(target, given[1])
    place = layers.physical(target)
    if place is None:
        return
    if directory_at(place) is not directory:
        raise fault(errno.ENOTDIR if directory else errno.EISDIR, *given)
    _clear(layers, target, given=given, directory=directory)


def _clear(layers: Layers, path: str, *, given: tuple[Any, ...], directory: bool) -> None:
    """Nothing is left of `path` in the upper layer. Raises OSError for a directory that is not empty."""
    upper = layers.upper(path)
    if directory and layers.names(path):
        raise fault(errno.ENOTEMPTY, *given)
    if there(upper):
        (REAL.rmdir if directory else REAL.unlink)(upper)
