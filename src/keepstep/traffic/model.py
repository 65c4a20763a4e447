"""Flow-level model: the rates that flows get on given ways, and the time of the collectives they belong to.

Every flow is elastic: it takes all it can, and links are shared max-min fairly, which is what congestion control of
large flows comes to; when a flow ends, the others take its share. Links are the cables (parallel ones apart) and both
directions of every NIC port. Start-up, retransmission and compute are not in it; `efficiency` is the part of a link's
nominal rate that payload reaches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keepstep.errors import TrafficError
from keepstep.records.demand import Flow
from keepstep.records.plan import Route
from keepstep.traffic.fairness import finish_times, max_min
from keepstep.traffic.hashing import hashed_routes
from keepstep.traffic.network import Network

__all__ = ["CollectiveTime", "Comparison", "Modelled", "compare", "flow_rates", "model"]

_BITS = 8e-9


class CollectiveTime(msgspec.Struct, frozen=True):
    """One collective of a job: seconds of transfer in a step, and the rate of its slowest flow in Gbit/s."""

    job: str
    use: str
    seconds: float
    slowest_gbps: float


class Modelled(msgspec.Struct, frozen=True):
    """What the model says of one set of routes. Rates in Gbit/s by flow name, means over the time of the flow."""

    rates: dict[str, float]
    collectives: tuple[CollectiveTime, ...]

    def slowest(self, job: str | None = None) -> float:
        """The rate of the slowest flow (of a job) in Gbit/s."""
        rates = (rate for name, rate in self.rates.items() if job is None or name.startswith(f"{job}:"))
        return min(rates, default=float("inf"))

    def seconds(self, job: str | None = None) -> float:
        """Seconds of transfer in a step, summed over collectives (of a job)."""
        return sum(one.seconds for one in self.collectives if job is None or one.job == job)


class Comparison(msgspec.Struct, frozen=True):
    """The plan against hashing with several seeds: seconds of transfer in a step of the job, and their ratio.

    `hashed_s` is (lowest, median, highest) over the seeds, `gain` median / planned.
    """

    job: str
    planned_s: float
    hashed_s: tuple[float, float, float]
    gain: float
    planned_gbps: float
    hashed_gbps: tuple[float, float, float]


def flow_rates(
    flows: Sequence[Flow], routes: Mapping[str, Route], *, network: Network, efficiency: float = 1.0
) -> dict[str, float]:
    """Gbit/s of each flow while all are active at once. Raises TrafficError for a missing route or a dead link."""
    links, capacity = _links(flows, routes, network=network, efficiency=efficiency)
    rates = max_min(links, capacity)
    return {flow.name: float(rate) for flow, rate in zip(flows, rates, strict=True)}


def _links(
    flows: Sequence[Flow], routes: Mapping[str, Route], *, network: Network, efficiency: float
) -> tuple[list[list[int]], list[float]]:
    """The numbers of the links of each flow, and what each link carries in Gbit/s."""
    number: dict[tuple[str, ...], int] = {}
    capacity: list[float] = []

    def index(key: tuple[str, ...], gbps: float) -> int:
        if key not in number:
            number[key] = len(capacity)
            capacity.append(gbps * efficiency)
        return number[key]

    links = []
    for flow in flows:
        route = routes.get(flow.name)
        if route is None:
            raise TrafficError(f"flow {flow.name!r} has no route")
        mine = [index(("out", flow.source), network.ports[flow.source].gbps)]
        mine.append(index(("in", flow.destination), network.ports[flow.destination].gbps))
        for start, end in zip(route.path, route.path[1:], strict=False):
            cable = network.cable(start, end)
            if cable is None or not network.alive(start, end):
                raise TrafficError(f"the route of flow {flow.name!r} uses {start}>{end}, which is down")
            mine.append(index((start, end, str(route.cable % cable.count)), cable.gbps))
        links.append(mine)
    return links, capacity


def model(flows: Sequence[Flow], routes: Iterable[Route], *, network: Network, efficiency: float = 1.0) -> Modelled:
    """Rates and times where each flow competes with those that are active in its own window of the step.

    Flows without a window are always active; those that compete begin together. Raises as `flow_rates`.
    """
    ways = {route.flow: route for route in routes}
    rates: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for start, end in dict.fromkeys((flow.start_s, flow.end_s) for flow in flows):
        active = [flow for flow in flows if _overlap(flow, start, end=end)]
        links, capacity = _links(active, ways, network=network, efficiency=efficiency)
        at_first = max_min(links, capacity)
        ends = finish_times(links, capacity, sizes=[flow.nbytes * _BITS for flow in active])
        for flow, rate, last in zip(active, at_first, ends, strict=True):
            if (flow.start_s, flow.end_s) == (start, end):
                seconds[flow.name] = float(last)
                rates[flow.name] = flow.nbytes * _BITS / float(last) if last > 0 else float(rate)
    slowest: dict[tuple[str, str], list[float]] = {}
    for flow in flows:
        entry = slowest.setdefault((flow.job, flow.use), [0.0, float("inf")])
        entry[0] = max(entry[0], seconds[flow.name])
        entry[1] = min(entry[1], rates[flow.name])
    times = tuple(CollectiveTime(job, use, *entry) for (job, use), entry in slowest.items())
    return Modelled(rates, times)


def compare(
    flows: Sequence[Flow], routes: Iterable[Route], *, network: Network, seeds: Sequence[int], efficiency: float = 1.0
) -> tuple[Comparison, ...]:
    """For every job: the plan against hashing with each of `seeds` (at least one). Raises as `flow_rates`."""
    planned = model(flows, routes, network=network, efficiency=efficiency)
    hashed = [
        model(flows, hashed_routes(flows, network, seed=seed), network=network, efficiency=efficiency) for seed in seeds
    ]
    found = []
    for job in dict.fromkeys(flow.job for flow in flows):
        seconds = sorted(one.seconds(job) for one in hashed)
        rates = sorted(one.slowest(job) for one in hashed)
        mine = planned.seconds(job)
        gain = statistics.median(seconds) / mine if mine else 1.0
        found.append(Comparison(job, mine, _spread(seconds), gain, planned.slowest(job), _spread(rates)))
    return tuple(found)


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return values[0], statistics.median(values), values[-1]


def _overlap(flow: Flow, start: float, *, end: float) -> bool:
    if flow.end_s <= flow.start_s or end <= start:
        return True
    return flow.start_s < end and start < flow.end_s
