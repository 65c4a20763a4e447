"""A layout of ranks in four kinds of nested groups: tensor, pipeline, data and expert parallel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "Layout", "Numbers"]

Numbers: TypeAlias = NDArray[Any]

KINDS = ("tp", "pp", "dp", "ep")
"""In the order in which a step uses them."""


@dataclass(frozen=True)
class Layout:
    """`tp` x `pp` x `dp` ranks, tensor parallel innermost; expert groups are runs of `ep` members of a data group."""

    tp: int
    pp: int
    dp: int
    ep: int = 1
    ranks_per_node: int = 8

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def stages(self) -> Numbers:
        """The pipeline stage of every rank."""
        return np.arange(self.world) // self.tp % self.pp

    @cache  # noqa: B019 - a layout is frozen, and there are few
    def groups(self, kind: str) -> Numbers:
        """The groups of a kind: one row of ranks for each."""
        cube = np.arange(self.world).reshape(self.dp, self.pp, self.tp)
        if kind == "tp":
            return cube.reshape(-1, self.tp)
        if kind == "pp":
            return cube.transpose(0, 2, 1).reshape(-1, self.pp)
        rows = cube.transpose(1, 2, 0).reshape(-1, self.dp)
        return rows if kind == "dp" else rows.reshape(-1, self.ep)

    def kinds(self) -> tuple[str, ...]:
        """The kinds that have more than one member."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        return tuple(kind for kind in KINDS if sizes[kind] > 1)

    @cache  # noqa: B019
    def places(self, kind: str) -> tuple[Numbers, Numbers]:
        """(number of its group, place in it) of every rank."""
        rows = self.groups(kind)
        number, place = np.empty(self.world, np.int64), np.empty(self.world, np.int64)
        number[rows] = np.arange(len(rows))[:, None]
        place[rows] = np.arange(rows.shape[1])[None, :]
        return number, place

    def group_hash(self, kind: str, number: Numbers | int) -> Numbers:
        """The hash of a group by its number; every group of the layout has another one."""
        hashes: Numbers = np.asarray(1 + KINDS.index(kind) + 4 * np.asarray(number), np.int64)
        return hashes

    @cache  # noqa: B019
    def neighbours(self, kind: str) -> Numbers:
        """The ranks that each rank exchanges bytes with in its group, -1 for none: the next and the one before it.

        In a ring; in a pipeline the ends have one neighbour.
        """
        rows = self.groups(kind)
        found = np.full((self.world, 2), -1, np.int64)
        found[rows, 0], found[rows, 1] = np.roll(rows, -1, axis=1), np.roll(rows, 1, axis=1)
        if kind == "pp":
            found[rows[:, -1], 0] = -1
            found[rows[:, 0], 1] = -1
        elif rows.shape[1] == 2:
            found[:, 1] = -1
        return found

    def node(self, rank: int) -> str:
        """The name of the node a rank runs on."""
        return f"n{rank // self.ranks_per_node}"
