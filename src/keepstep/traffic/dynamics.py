"""Which paths to leave, when to come back, and how to share bytes among paths, without oscillation.

A path is left at once when nothing arrives on it, and after `persist` slow steps in a row. It comes back after `quiet`
good probes in a row; each time it is left again soon after, twice as many are asked for. Shares of bytes follow the
speeds of the paths, but start to move only when they are off by more than `deadband`, and stop within a third of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

__all__ = ["DynamicsPolicy", "LoadWeights", "PathWatch", "Verdict"]


class DynamicsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds; speeds are relative to the median of the other paths, counts are steps or probes."""

    slow_below: float = 0.7
    good_above: float = 0.9
    persist: int = 3
    quiet: int = 20
    longest_quiet: int = 640
    deadband: float = 0.15
    damping: float = 0.5
    least_weight: float = 0.02


@dataclass(frozen=True)
class Verdict:
    """What one step changed: paths to leave and paths to use again, with reasons in words by path."""

    leave: tuple[str, ...] = ()
    use_again: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


class PathWatch:
    """The health of some parallel paths, from what was transferred in each step."""

    def __init__(self, paths: Sequence[str], policy: DynamicsPolicy | None = None) -> None:
        self._policy = policy or DynamicsPolicy()
        self._slow = dict.fromkeys(paths, 0)
        self._good = dict.fromkeys(paths, 0)
        self._needed = dict.fromkeys(paths, self._policy.quiet)
        self._left: set[str] = set()
        self.avoided: set[str] = set()

    def step(self, speeds: Mapping[str, float]) -> Verdict:
        """Take the speed of each path in one step (or of its probe, if it is avoided); 0.0: nothing arrived.

        Paths that are not in `speeds` were not used and say nothing. The last path is never left.
        """
        leave: list[str] = []
        reasons: dict[str, str] = {}
        for path, speed in speeds.items():
            used = {name: value for name, value in speeds.items() if name not in self.avoided and value > 0}
            others = [value for name, value in used.items() if name != path]
            share = speed / statistics.median(others) if others else 1.0
            if path in self.avoided:
                self._good[path] = self._good[path] + 1 if share >= self._policy.good_above and speed > 0 else 0
                continue
            self._slow[path] = self._slow[path] + 1 if share < self._policy.slow_below else 0
            dead = speed <= 0.0 and bool(others)
            if dead or self._slow[path] >= self._policy.persist:
                leave.append(path)
                reasons[path] = "nothing arrives" if dead else f"{share:.0%} of the others for {self._slow[path]} steps"
        leave = leave[: max(0, len(self._slow) - len(self.avoided) - 1)]
        for path in leave:
            self._avoid(path)
        back = tuple(path for path in speeds if self._good[path] >= self._needed[path] and path in self.avoided)
        for path in back:
            self.avoided.discard(path)
            reasons[path] = f"{self._good[path]} good probes in a row"
            self._good[path] = 0
        return Verdict(tuple(leave), back, {path: reasons[path] for path in (*leave, *back)})

    def _avoid(self, path: str) -> None:
        if path in self._left:
            self._needed[path] = min(2 * self._needed[path], self._policy.longest_quiet)
        self._left.add(path)
        self.avoided.add(path)
        self._slow[path] = 0
        self._good[path] = 0


class LoadWeights:
    """How the bytes of a connection are shared among its paths; weights add up to 1."""

    def __init__(self, paths: Sequence[str], policy: DynamicsPolicy | None = None) -> None:
        """`paths` are at least one."""
        self._policy = policy or DynamicsPolicy()
        self.weights = {path: 1.0 / len(paths) for path in paths}
        self.changes = 0
        self._speed: dict[str, float] = {}
        self._off = 0
        self._moving = False

    def step(self, speeds: Mapping[str, float]) -> bool:
        """Take the speed of each path in one step; whether the weights changed. Paths not in `speeds` keep theirs."""
        for path, speed in speeds.items():
            old = self._speed.get(path, speed)
            self._speed[path] = old + self._policy.damping * (speed - old)
        total = sum(self._speed.get(path, 0.0) for path in self.weights)
        if total <= 0 or len(self._speed) < len(self.weights):
            return False
        wanted = {path: max(self._policy.least_weight, self._speed[path] / total) for path in self.weights}
        scale = sum(wanted.values())
        wanted = {path: weight / scale for path, weight in wanted.items()}
        error = max(abs(wanted[path] / weight - 1) for path, weight in self.weights.items())
        self._off = self._off + 1 if error > self._policy.deadband else 0
        if self._off >= self._policy.persist:
            self._moving = True
        if error < self._policy.deadband / 3:
            self._moving = False
        if not self._moving:
            return False
        for path, weight in self.weights.items():
            self.weights[path] = weight + self._policy.damping * (wanted[path] - weight)
        self.changes += 1
        return True
