"""What probing found, judged: which source ports share a path, which paths are silent or slow.

Pure: times and answers in, a `Catalogue` out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal

from keepstep.records.plan import Catalogue, PortPath

__all__ = ["MAX_AGE_S", "catalogue_of", "path_states", "split_by_load"]

MAX_AGE_S = 600.0
"""A catalogue older than this is probed again before it is used: routing may have changed."""

_State = Literal["good", "slow", "bad"]
_SLOW_FACTOR = 3.0
_SLOW_LEAST_S = 1e-3
_LOAD_FACTOR = 3.0
_LOAD_LEAST_S = 0.5e-3


def path_states(
    paths: Mapping[int, tuple[str, ...]], round_trip_s: Mapping[int, float], *, silent: frozenset[int] = frozenset()
) -> dict[tuple[str, ...], tuple[_State, float]]:
    """The state ("good", "slow", "bad") and the median round trip of every path.

    `paths` by source port; `round_trip_s` of the ports that were timed, `silent` those that got no answer. A path is
    bad if none of its timed ports was answered, slow if its median is over 3 times the median of all paths and 1 ms
    above it: an idle path of the same length cannot be that much longer.
    """
    times: dict[tuple[str, ...], list[float]] = {path: [] for path in paths.values()}
    for port, seconds in round_trip_s.items():
        if port in paths:
            times[paths[port]].append(seconds)
    dead = {paths[port] for port in silent if port in paths and not times[paths[port]]}
    medians = {path: statistics.median(values) for path, values in times.items() if values}
    usual = statistics.median(medians.values()) if medians else 0.0
    limit = max(_SLOW_FACTOR * usual, usual + _SLOW_LEAST_S)

    def state(path: tuple[str, ...]) -> _State:
        if path in dead:
            return "bad"
        return "slow" if medians.get(path, 0.0) > limit else "good"

    return {path: (state(path), medians.get(path, 0.0)) for path in times}


def catalogue_of(
    ends: tuple[str, str],
    paths: Mapping[int, tuple[str, ...]],
    *,
    wall: float,
    method: Literal["ttl", "round_trip"],
    round_trip_s: Mapping[int, float],
    silent: frozenset[int] = frozenset(),
) -> Catalogue:
    """The catalogue of (source, destination) `ends`. A port without a path, as a probe that got no answer, is bad."""
    states = path_states(paths, round_trip_s, silent=silent)
    found = [PortPath(port, path, state=states[path][0], round_trip_s=states[path][1]) for port, path in paths.items()]
    found += [PortPath(port, (), state="bad") for port in silent if port not in paths]
    return Catalogue(*ends, wall=wall, method=method, ports=tuple(sorted(found, key=lambda one: one.source_port)))


def split_by_load(idle_s: Mapping[int, float], loaded_s: Mapping[int, float]) -> frozenset[int]:
    """The ports that wait behind the load of a reference connection: their round trip grew to 3 times what it is
    without the load, and by half a millisecond at least. A port that is not in both is left out."""

    def waits(port: int) -> bool:
        before, under = idle_s[port], loaded_s[port]
        return under > _LOAD_FACTOR * before and under - before > _LOAD_LEAST_S

    return frozenset(port for port in loaded_s if port in idle_s and waits(port))
