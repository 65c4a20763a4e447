"""Whose fault is a slow flow, the path's or its own? Answered by what happens after it moved.

The speed of a flow is what its connection delivered per second in which it had something to send. A path whose flows
are slower than those of other paths gives less than they do, and gets fewer flows. When the flows that left it are slow
elsewhere too, it was not the path: it is trusted again, and these flows (of a slow host, as a rule) no longer tell how
paths fare until they are as fast as others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.traffic.dynamics import DynamicsPolicy, PathShares, Speed, Verdict, kinder, reference

__all__ = ["Pair", "PathJudge"]

Pair = tuple[int, int]
_Flows = Mapping[Pair, tuple[str, float]]


@dataclass
class _Trial:
    """The flows that were on a path when it slowed down, what the other paths gave then, and how those that left it
    have fared since."""

    flows: frozenset[Pair]
    usual: Speed
    slow: int = 0
    good: int = 0


class PathJudge:
    """The spines between two leaves, in one direction."""

    def __init__(self, spines: tuple[str, ...], policy: DynamicsPolicy | None = None) -> None:
        self._policy = policy or DynamicsPolicy()
        self._shares = PathShares(spines, self._policy)
        self._trials: dict[str, _Trial] = {}
        self.aside: set[Pair] = set()
        """Flows, by (from, to) rank, that are slow wherever they go."""
        self.heard: set[str] = set()
        """The spines that the last look told of."""

    @property
    def slow(self) -> Mapping[str, float]:
        """The share of its rate that every slow spine gives."""
        return self._shares.lowered

    def forget_flows(self) -> None:
        """The members are others now; what was learnt about spines stays."""
        self._trials.clear()
        self.aside.clear()

    def due(self, now: float) -> Verdict:
        """The spines that are trusted again from now on, without a sign."""
        found = self._shares.due(now)
        for spine in found.raised:
            self._trials.pop(spine, None)
        return found

    def look(self, flows: _Flows, *, now: float) -> Verdict:
        """Take the spine and the speed in bytes per s of every flow since the last look."""
        speeds = self._speeds(flows)
        self.heard = set(speeds)
        pardoned = self._tried(flows)
        for spine in pardoned:
            self._shares.pardon(spine)
        if pardoned:
            text = "the flows that left it are as slow elsewhere"
            return Verdict((), tuple(pardoned), dict.fromkeys(pardoned, text))
        self._take_back(flows, speeds)
        before = set(self._shares.lowered)
        verdict = self._shares.step(speeds, now=now)
        others = [speed for name, speed in speeds.items() if name not in self._shares.lowered and speed.fastest > 0]
        for spine in verdict.lowered:
            if spine not in before and others:
                moving = frozenset(pair for pair, (where, _) in flows.items() if where == spine)
                self._trials[spine] = _Trial(moving - self.aside, reference(others))
        return verdict

    def _speeds(self, flows: _Flows) -> dict[str, Speed]:
        by_spine: dict[str, list[float]] = {}
        for pair, (spine, speed) in flows.items():
            if pair not in self.aside:
                by_spine.setdefault(spine, []).append(speed)
        return {spine: Speed(max(found), self._on(flows, spine)) for spine, found in by_spine.items()}

    @staticmethod
    def _on(flows: _Flows, spine: str) -> int:
        return sum(where == spine for where, _ in flows.values())

    def _share(self, flows: _Flows, pair: Pair, *, usual: Speed) -> float:
        spine, speed = flows[pair]
        return kinder(Speed(speed, self._on(flows, spine)), usual)

    def _tried(self, flows: _Flows) -> list[str]:
        """Look at the flows that left a spine; returns the spines that were not to blame."""
        pardoned = []
        for spine, trial in list(self._trials.items()):
            moved = [pair for pair in trial.flows if pair in flows and flows[pair][0] != spine]
            if not moved:
                continue
            if max(self._share(flows, pair, usual=trial.usual) for pair in moved) < self._policy.slow_below:
                trial.slow += 1
            else:
                trial.good += 1
            if trial.good >= self._policy.persist:
                del self._trials[spine]
            elif trial.slow >= self._policy.persist:
                del self._trials[spine]
                self.aside |= trial.flows
                pardoned.append(spine)
        return pardoned

    def _take_back(self, flows: _Flows, speeds: Mapping[str, Speed]) -> None:
        """Flows that are as fast as others tell of their paths again."""
        if not speeds:
            self.aside.clear()
            return
        usual = reference(list(speeds.values()))
        for pair in [pair for pair in self.aside if pair in flows]:
            if usual.fastest <= 0 or self._share(flows, pair, usual=usual) >= self._policy.good_above:
                self.aside.discard(pair)
