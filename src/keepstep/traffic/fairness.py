"""Max-min fair rates of flows that share links, by progressive filling (Bertsekas, Gallager: Data Networks, 6.5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["max_min"]

_CLOSE = 1e-9


def max_min(links_of: Sequence[Sequence[int]], capacity: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rate of each flow; `links_of[i]` are the links it uses, `capacity[l]` what each carries, in one unit.

    All rates rise together; the flows of a link that is full stop. Links that are the tightest of all their flows are
    filled in the same round, which gives the same rates in fewer rounds. A flow without links has an infinite rate.
    """
    remaining = np.array(capacity, dtype=np.float64)
    counts = np.fromiter((len(links) for links in links_of), dtype=np.int64, count=len(links_of))
    rates = np.full(len(counts), np.inf)
    if not counts.sum():
        return rates
    link = np.concatenate([np.asarray(links, dtype=np.int64) for links in links_of if len(links)])
    flow = np.repeat(np.arange(len(counts)), counts)
    while len(link):
        users = np.bincount(link, minlength=len(remaining))
        share = np.where(users > 0, np.maximum(remaining, 0.0) / np.maximum(users, 1), np.inf)
        tightest = np.full(len(counts), np.inf)
        np.minimum.at(tightest, flow, share[link])
        worst = np.full(len(remaining), -np.inf)
        np.maximum.at(worst, link, share[link] - tightest[flow])
        full = worst <= _CLOSE * np.maximum(share, 1.0)
        stopped = np.unique(flow[full[link] & (users[link] > 0)])
        rates[stopped] = tightest[stopped]
        ended = np.isin(flow, stopped, assume_unique=False)
        np.subtract.at(remaining, link[ended], rates[flow[ended]])
        link, flow = link[~ended], flow[~ended]
    return rates
