"""A member's place in its world, and the mode its collectives run in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Mode", "Place"]


class Mode(Enum):
    """How collectives are carried out; see `fabric.py`."""

    LIVE = "live"
    POISONED = "poisoned"
    LOCAL = "local"


@dataclass(frozen=True)
class Place:
    """Global `rank` of this member in a world of `world`, in `generation`. `ranks` where they are not 0..world-1."""

    rank: int
    world: int
    generation: int
    ranks: tuple[int, ...] = ()
