"""Max-min fair rates of flows that share links, by progressive filling (Bertsekas, Gallager: Data Networks, 6.5.2), and
when the flows end if the others take what an ended one leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["finish_times", "max_min"]

_CLOSE = 1e-9
_EXACT_FLOWS = 256
_TOGETHER = 0.05


def max_min(links_of: Sequence[Sequence[int]], capacity: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rate of each flow; `links_of[i]` are the links it uses, `capacity[l]` what each carries, in one unit.

    All rates rise together; the flows of a link that is full stop. Links that are the tightest of all their flows are
    filled in the same round, which gives the same rates in fewer rounds. A flow without links has an infinite rate.
    """
    return _filled(*_uses(links_of), capacity=capacity, flows=len(links_of))


def _uses(links_of: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The link and the flow of every use of a link."""
    counts = np.fromiter((len(links) for links in links_of), dtype=np.int64, count=len(links_of))
    link = np.fromiter((link for links in links_of for link in links), dtype=np.int64, count=counts.sum())
    return link, np.repeat(np.arange(len(counts)), counts)


def _filled(
    link: npt.NDArray[np.int64], flow: npt.NDArray[np.int64], *, capacity: npt.ArrayLike, flows: int
) -> npt.NDArray[np.float64]:
    remaining = np.array(capacity, dtype=np.float64)
    rates = np.full(flows, np.inf)
    while len(link):
        users = np.bincount(link, minlength=len(remaining))
        share = np.where(users > 0, np.maximum(remaining, 0.0) / np.maximum(users, 1), np.inf)
        tightest = np.full(flows, np.inf)
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


def finish_times(
    links_of: Sequence[Sequence[int]], capacity: npt.ArrayLike, *, sizes: Sequence[float]
) -> npt.NDArray[np.float64]:
    """When each flow ends if all begin at 0 and carry `sizes`, in units of capacity x time: rates are max-min fair, and
    filled anew whenever flows end. Every flow needs a link.

    While more than 256 flows are active, those that end within 5 % of the time passed free their shares together, with
    the last of them: fewer rounds, and times that are some percent too long.
    """
    left = np.array(sizes, dtype=np.float64)
    ends = np.zeros(len(left))
    active = np.flatnonzero(left > 0)
    going = left > 0
    link, flow = _uses(links_of)
    now = 0.0
    while len(active):
        link, flow = link[going[flow]], flow[going[flow]]
        rates = _filled(link, flow, capacity=capacity, flows=len(left))[active]
        lasts = left[active] / rates
        first = float(lasts.min())
        together = _TOGETHER if len(active) > _EXACT_FLOWS else _CLOSE
        ended = lasts <= first + together * (now + first)
        ends[active[ended]] = now + lasts[ended]
        span = float(lasts[ended].max())
        left[active] -= rates * span
        now += span
        going[active[ended]] = False
        active = active[~ended]
    return ends
