"""Painting spans of time so that each moment has exactly one label. Pure, in whole microseconds.

Where spans overlap the one with the higher priority wins; where none is, a ground label holds. The work is done on
the elementary pieces between all boundaries, for all attempts at once.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

__all__ = ["Spans", "paint"]


class Spans(msgspec.Struct, frozen=True):
    """Arrays of equal length: number of the attempt, label (column of the ledger), begin and end in microseconds."""

    attempt: Any
    label: Any
    start: Any
    end: Any


def paint(starts: Any, ends: Any, *, spans: Spans, priority: tuple[int, ...], ground: int) -> Any:
    """One row an attempt [start, end), one column a label: microseconds under it. Rows add up to end - start.

    `priority` lists every label (column number), the strongest last; parts of spans outside their attempt do not count.
    """
    begin, stop = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    matrix = np.zeros((len(begin), len(priority)), np.int64)
    if not len(begin):
        return matrix
    of = np.asarray(spans.attempt, np.int64)
    low = np.clip(np.asarray(spans.start, np.int64), begin[of], stop[of])
    high = np.clip(np.asarray(spans.end, np.int64), low, stop[of])
    every = np.concatenate([begin, stop, low, high])
    owner = np.concatenate([np.arange(len(begin)), np.arange(len(begin)), of, of])
    order = np.lexsort((every, owner))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    edges, owners = every[order], owner[order]
    width = np.where(np.append(owners[1:] == owners[:-1], False), np.append(edges[1:], 0) - edges, 0)
    first, last = place[2 * len(begin) : 2 * len(begin) + len(of)], place[2 * len(begin) + len(of) :]
    painted = np.full(len(edges), ground)
    for label in priority:
        chosen = np.asarray(spans.label) == label
        if chosen.any():
            cover = np.zeros(len(edges) + 1, np.int64)
            np.add.at(cover, first[chosen], 1)
            np.add.at(cover, last[chosen], -1)
            painted[np.cumsum(cover[:-1]) > 0] = label
    np.add.at(matrix, (owners, painted), width)
    return matrix
