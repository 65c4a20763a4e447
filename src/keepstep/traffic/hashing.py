"""The ways that switches choose by themselves: equal-cost multipath by a hash of the connection's 5-tuple.

Real switches use hash functions of their makers with unknown seeds; here a well-mixed 64-bit hash stands for them, so
that a seed gives a repeatable choice and many seeds give its distribution. `chance_of_collision` and `expected_fullest`
are the closed forms that this must agree with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keepstep.records.demand import Flow
from keepstep.records.plan import Route
from keepstep.traffic.network import Network

__all__ = ["chance_of_collision", "expected_fullest", "hashed_ports", "hashed_routes"]

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_EXACT_FLOWS = 400


def hashed_routes(flows: Sequence[Flow], network: Network, *, seed: int) -> list[Route]:
    """The way of each flow as hashing with `seed` chooses it; flows without any way left are not among them."""
    numbers = _hashes(len(flows), seed)
    found = []
    for flow, number in zip(flows, numbers, strict=True):
        source, destination = network.ports[flow.source].leaf, network.ports[flow.destination].leaf
        paths = network.paths_between(source, destination)
        if not paths:
            continue
        path = paths[number % len(paths)]
        cable = network.cable(path[0], path[1]) if len(path) > 1 else None
        found.append(Route(flow.name, path, (number // len(paths)) % (cable.count if cable else 1)))
    return found


def hashed_ports(flows: Sequence[Flow], network: Network, *, seed: int) -> list[Flow]:
    """The flows as a bonded NIC without a plan sends them: each leaves and enters by a port that a hash chooses."""
    numbers = _hashes(2 * len(flows), seed + 1)
    found = []
    for place, flow in enumerate(flows):
        ends = []
        for name, number in zip((flow.source, flow.destination), numbers[2 * place : 2 * place + 2], strict=True):
            port = network.ports[name]
            sides = [other for other in network.of_host[port.host] if other.rail == port.rail]
            ends.append(sides[number % len(sides)].name)
        found.append(Flow(flow.job, flow.use, ends[0], ends[1], flow.nbytes, flow.start_s, flow.end_s, place))
    return found


def chance_of_collision(flows: int, ways: int) -> float:
    """Chance that some way gets two or more of `flows` random flows (the birthday problem)."""
    if flows > ways:
        return 1.0
    return 1.0 - math.prod((ways - taken) / ways for taken in range(flows))


def expected_fullest(flows: int, ways: int) -> float:
    """Mean number of flows on the fullest of `ways` equal ways when each of `flows` chooses one at random.

    Exact by convolution (Poisson counts given their sum); above 400 flows mean + sqrt(2 mean ln ways) (Raab and Steger
    1998).
    """
    if flows == 0 or ways <= 0:
        return 0.0
    if ways == 1:
        return float(flows)
    mean = flows / ways
    if flows > _EXACT_FLOWS:
        return mean + math.sqrt(2 * mean * math.log(ways))
    logs = [count * math.log(mean) - mean - math.lgamma(count + 1) for count in range(flows + 1)]
    whole = math.exp(flows * math.log(flows) - flows - math.lgamma(flows + 1))
    expected = 0.0
    for fullest in range(flows):
        below = np.exp(np.array(logs[: fullest + 1]))
        chance = _power(below, ways, size=flows + 1)[flows] / whole
        expected += 1.0 - min(1.0, float(chance))
        if chance > 1 - 1e-12:
            break
    return expected


def _power(series: npt.NDArray[np.float64], exponent: int, *, size: int) -> npt.NDArray[np.float64]:
    """The power series `series`**`exponent`, its first `size` coefficients."""
    result = np.zeros(size)
    result[0] = 1.0
    factor = np.zeros(size)
    factor[: len(series)] = series[:size]
    while exponent:
        if exponent & 1:
            result = np.convolve(result, factor)[:size]
        factor = np.convolve(factor, factor)[:size]
        exponent >>= 1
    return result


def _hashes(count: int, seed: int) -> list[int]:
    """splitmix64 of the numbers 0 to count-1 under `seed`."""
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed % (1 << 32)) * np.uint64(1 << 20)) * _MIX[0]
        state = (state ^ (state >> np.uint64(30))) * _MIX[1]
        state = (state ^ (state >> np.uint64(27))) * _MIX[2]
        state ^= state >> np.uint64(31)
    return [int(number) for number in state]
