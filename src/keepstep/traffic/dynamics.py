"""How much of its rate does each of several parallel paths give? Told by the speeds of flows, without swinging.

Speeds tell of a path only within bounds: where several flows are on it nobody knows whether they were active at once.
A share is lowered when even the kinder bound is below it, raised when even the harsher one is above it, and only after
`persist` looks in a row that say so. A path without flows shows nothing, and one with few flows may be well though they
do not prove it: `first_wait_s` after it was last surely slow it is trusted again, and if it is slow again before that
time has passed once more, the next wait is twice as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

__all__ = ["DynamicsPolicy", "PathShares", "Speed", "Verdict", "kinder", "reference"]


class DynamicsPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds. Speeds are relative to the median of the other paths, or, where there is none, to what the path
    usually gives; `persist` counts looks; waits are in s."""

    slow_below: float = 0.7
    fallen_below: float = 0.5
    good_above: float = 0.9
    deadband: float = 0.15
    persist: int = 3
    least_share: float = 0.02
    first_wait_s: float = 30.0
    longest_wait_s: float = 1920.0


class Speed(NamedTuple):
    """Bytes per s of the fastest flow on a path, and how many flows are on it."""

    fastest: float
    flows: int = 1


@dataclass(frozen=True)
class Verdict:
    """The paths whose share was lowered and raised by one look, with reasons in words by path."""

    lowered: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def reference(speeds: Sequence[Speed]) -> Speed:
    """What usual paths give: the medians. `speeds` are at least one."""
    flows = round(statistics.median(speed.flows for speed in speeds))
    return Speed(statistics.median(speed.fastest for speed in speeds), max(1, flows))


def kinder(speed: Speed, usual: Speed) -> float:
    """The share of `usual` that a path gives if flows that share a path are active at once."""
    return speed.fastest / usual.fastest * max(1.0, speed.flows / usual.flows)


def _harsher(speed: Speed, usual: Speed) -> float:
    """The share of `usual` that a path gives if fewer flows make it seem faster than it is."""
    return speed.fastest / usual.fastest * min(1.0, speed.flows / usual.flows)


class PathShares:
    """The shares of some parallel paths, from what was transferred between looks. All begin with 1."""

    def __init__(self, paths: Sequence[str], policy: DynamicsPolicy | None = None) -> None:
        self._policy = policy or DynamicsPolicy()
        self._off = dict.fromkeys(paths, 0)
        self._usual: dict[str, Speed] = {}
        self._wait = dict.fromkeys(paths, self._policy.first_wait_s)
        self._trusted: dict[str, float] = {}
        self._sure: dict[str, float] = {}
        self.lowered: dict[str, float] = {}
        """The share of every path that gives less than all."""

    def step(self, speeds: Mapping[str, Speed], *, now: float) -> Verdict:
        """Take the speeds since the last look. Paths that are not in `speeds` had no flow and say nothing."""
        lowered: list[str] = []
        raised: list[str] = []
        reasons: dict[str, str] = {}
        for path, speed in speeds.items():
            have = self.lowered.get(path, 1.0)
            share, seen, what = self._wanted(path, speeds, now=now)
            if share == have == 1.0:
                self._usual[path] = self._remembered(path, speed)
            self._off[path] = self._off[path] + 1 if share != have else 0
            if self._off[path] < self._policy.persist:
                continue
            self._set(path, share, now=now)
            (lowered if share < have else raised).append(path)
            reasons[path] = f"{seen:.0%} of {what} for {self._policy.persist} looks"
        return Verdict(tuple(lowered), tuple(raised), reasons)

    def due(self, now: float) -> Verdict:
        """The paths that were not surely slow for as long as they have to wait: they are trusted again from now on."""
        back = tuple(path for path in self.lowered if now - self._sure.get(path, now) >= self._wait[path])
        for path in back:
            self._trusted[path] = now
            del self.lowered[path]
        return Verdict((), back, {path: f"tried again after {self._wait[path]:.0f} s" for path in back})

    def pardon(self, path: str) -> None:
        """Trust a path again that seemed slow for no fault of its own."""
        self.lowered.pop(path, None)
        self._wait[path] = self._policy.first_wait_s
        self._off[path] = 0

    def _wanted(self, path: str, speeds: Mapping[str, Speed], *, now: float) -> tuple[float, float, str]:
        """The share that a path should have, the one that was seen, and what it is relative to, in words."""
        have, speed, policy = self.lowered.get(path, 1.0), speeds[path], self._policy
        others = [one for name, one in speeds.items() if name != path and name not in self.lowered and one.fastest > 0]
        usual = reference(others) if others else self._usual.get(path)
        if usual is None or usual.fastest <= 0:
            return have, 1.0, "itself"
        what = "the others" if others else "what it usually gives"
        most, least = kinder(speed, usual), _harsher(speed, usual)
        if most < policy.good_above:
            self._sure[path] = now
        if have == 1.0:
            limit = policy.slow_below if others else policy.fallen_below
            return (max(policy.least_share, most) if most < limit else 1.0), most, what
        if most < have * (1 - policy.deadband):
            return max(policy.least_share, most), most, what
        if least > have * (1 + policy.deadband) or least >= policy.good_above:
            return (1.0 if least >= policy.good_above else least), least, what
        return have, most, what

    def _remembered(self, path: str, speed: Speed) -> Speed:
        before = self._usual.get(path)
        if before is None or before.fastest <= 0:
            return speed
        return Speed(0.8 * before.fastest + 0.2 * speed.fastest, speed.flows)

    def _set(self, path: str, share: float, *, now: float) -> None:
        self._off[path] = 0
        if share >= 1.0:
            del self.lowered[path]
            self._trusted[path] = now
            return
        if path not in self.lowered:
            soon = path in self._trusted and now - self._trusted[path] < self._wait[path]
            first, longest = self._policy.first_wait_s, self._policy.longest_wait_s
            self._wait[path] = min(2 * self._wait[path], longest) if soon else first
        self.lowered[path] = share
