"""From counters of connections to the speeds of flows: how much each way carried since the last look, and for how long
it was busy. Looks wait until every spine in use was heard, so that speeds are compared over the same time."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.records.path_messages import Carried, Way
from keepstep.traffic.path_judge import Pair

__all__ = ["Ends", "PathCounts", "Place3"]

Ends = tuple[str, str]
Place3 = tuple[Pair, Ends, str]
"""Of a way: its (from, to) rank, the leaves at its ends, and the spine that it passes."""

_LEAST_US = 5_000
_LEAST_BYTES = 256 * 1024
_LONG_US = 400_000
_LONGEST_S = 5.0


class PathCounts:
    """The ways of the plan in force, and what was counted on them."""

    def __init__(self) -> None:
        self._ways: dict[Way, Place3] = {}
        self._last: dict[Way, Carried] = {}
        self._sum: dict[Way, Carried] = {}
        self._since: dict[Ends, float] = {}

    def follow(self, ways: Mapping[Way, Place3], *, now: float) -> None:
        """Watch these ways from `now` on. Where they are others than before, what was counted does not count."""
        if ways == self._ways:
            return
        self._ways = dict(ways)
        self._last, self._sum = {}, {}
        self._since = {ends: now for _, ends, _ in self._ways.values()}

    def take(self, way: Way, carried: Carried) -> None:
        """What the connection of a way has carried so far, all in all; zeros: there is none."""
        if way not in self._ways or not carried.busy_us:
            return
        before = self._last.get(way)
        self._last[way] = carried
        if before is None or carried.nbytes < before.nbytes or carried.busy_us < before.busy_us:
            return  # seen for the first time, or another connection by now
        have = self._sum.get(way, Carried())
        nbytes = have.nbytes + carried.nbytes - before.nbytes
        self._sum[way] = Carried(nbytes, have.busy_us + carried.busy_us - before.busy_us)

    def heard(self, now: float) -> dict[Ends, dict[Pair, tuple[str, float]]]:
        """The flows between each two leaves that can be compared now, with spine and bytes per s. They start anew."""
        by_ends: dict[Ends, dict[Pair, tuple[str, float]]] = {}
        used: dict[Ends, set[str]] = {}
        for way, (pair, ends, spine) in self._ways.items():
            if way not in self._last:
                continue
            used.setdefault(ends, set()).add(spine)
            speed = self._speed(way)
            if speed is not None:
                flows = by_ends.setdefault(ends, {})
                flows[pair] = max(flows.get(pair, (spine, 0.0)), (spine, speed), key=lambda one: one[1])
        found = {}
        for ends, flows in by_ends.items():
            whole = {spine for spine, _ in flows.values()} == used[ends]
            if whole or now - self._since[ends] >= _LONGEST_S:
                found[ends] = flows
                self._since[ends] = now
        for way, (_, ends, _) in self._ways.items():
            if ends in found:
                self._sum.pop(way, None)
        return found

    def _speed(self, way: Way) -> float | None:
        """Bytes per s while busy; None: too little to tell."""
        have = self._sum.get(way, Carried())
        if have.busy_us >= _LONG_US or (have.busy_us >= _LEAST_US and have.nbytes >= _LEAST_BYTES):
            return have.nbytes * 1e6 / have.busy_us
        return None
