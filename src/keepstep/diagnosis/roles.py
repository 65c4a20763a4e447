"""Whom a rank may be compared with: the ranks that do the same work, derived from the groups they speak in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from keepstep.diagnosis.pair_history import PairHistory
from keepstep.diagnosis.windows import Numbers
from keepstep.records.summary import MemberProfile

__all__ = ["derived_roles", "explained_by_place", "families_of", "lower_medians"]


def derived_roles(world: int, pairs: PairHistory) -> Numbers:
    """The role of every rank, from 0: its stage, where messages join the ranks into pipelines of equal length.

    Ranks that differ only in their tensor, data or expert coordinate do the same work and share a role. Where messages
    join nothing, or join ranks into chains of different length, all have role 0.
    """
    ends = np.flatnonzero(pairs.messages)
    ranks, peers = pairs.ranks[ends], pairs.peers[ends]
    inside = (ranks < world) & (peers < world)
    ranks, peers = ranks[inside], peers[inside]
    if not len(ranks):
        return np.zeros(world, np.int64)
    graph = coo_array((np.ones(len(ranks), np.int8), (ranks, peers)), shape=(world, world))
    count, part = connected_components(graph.tocsr(), directed=False)
    order = np.argsort(part, kind="stable")
    sizes = np.bincount(part, minlength=count)
    if sizes.min() != sizes.max() or sizes[0] < 2:
        return np.zeros(world, np.int64)
    roles = np.empty(world, np.int64)
    roles[order] = np.tile(np.arange(sizes[0]), count)
    return roles


def lower_medians(values: Numbers, roles: Numbers) -> Numbers:
    """For every rank and step, the lower median of `values` (rank by step) over the ranks of its role.

    The lower of the two middle ones, so that of two ranks the quicker is the measure. NaN is passed over.
    """
    measure = np.empty_like(values)
    for role in np.unique(roles):
        mine = roles == role
        ordered = np.sort(values[mine], axis=0)
        count = np.count_nonzero(~np.isnan(ordered), axis=0)
        at = np.maximum((count - 1) // 2, 0)
        measure[mine] = np.take_along_axis(ordered, at[None, :], axis=0)
    return measure


def families_of(profiles: Mapping[int, MemberProfile], world: int) -> dict[tuple[int, int], dict[int, int]]:
    """(size, how many groups of that size a rank made before) to rank to its place in that group.

    All ranks make their groups in the same order, so that one family is one dimension of the layout. The groups of
    everybody and of one rank alone say nothing and are left out.
    """
    families: dict[tuple[int, int], dict[int, int]] = {}
    for rank, profile in profiles.items():
        made: Counter[int] = Counter()
        for entry in profile.groups:
            if entry.lane == 0 and 1 < entry.size < world:
                families.setdefault((entry.size, made[entry.size]), {})[rank] = entry.group_rank
                made[entry.size] += 1
    return families


def explained_by_place(slow: Iterable[int], families: Mapping[tuple[int, int], Mapping[int, int]]) -> bool:
    """Whether the slow ranks are exactly those with some place in the groups of a family: their share is larger.

    Only where the place is held by several ranks.
    """
    wanted = frozenset(slow)
    for places in families.values():
        of_wanted = {places[rank] for rank in wanted if rank in places}
        if len(of_wanted) == 1 and len(wanted) > 1:
            (place,) = of_wanted
            if wanted == frozenset(rank for rank, held in places.items() if held == place):
                return True
    return False
