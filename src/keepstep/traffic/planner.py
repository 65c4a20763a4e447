"""The plan of a site: routes for all large flows of all jobs, changed as little as possible as things come and go.

Every method checks first and changes afterwards: when one raises, the plan is what it was before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from keepstep.errors import TrafficError
from keepstep.records.demand import Flow
from keepstep.records.plan import Advice, Plan, Route
from keepstep.records.topology import Topology
from keepstep.traffic.checking import checked
from keepstep.traffic.network import Network
from keepstep.traffic.part import Part, Way

__all__ = ["Change", "Planner"]

_GIGA = 1e9


@dataclass(frozen=True)
class Change:
    """What one call changed: flows that came, went, and moved though they were neither; the routes that are new.

    `stranded` are flows that no way is left for; they wait for a link to come back.
    """

    added: int
    removed: int
    moved: int
    routes: tuple[Route, ...]
    stranded: tuple[str, ...]
    max_load: float
    bound: float


@dataclass(frozen=True)
class _Slot:
    """Flows of one job between two leaves that are never active together, and therefore share a way."""

    job: str
    source: str
    destination: str
    part: int
    weight: float
    flows: tuple[Flow, ...]


class Planner:
    """All jobs on one topology. `measure` "flows" keeps the number of flows on a cable lowest, "bytes" their bytes."""

    def __init__(
        self, topology: Topology, *, measure: Literal["flows", "bytes"] = "flows", down: Iterable[str] = ()
    ) -> None:
        """Raises TrafficError for a topology that cannot be planned on, and unknown names in `down`."""
        self.network = Network(checked(topology), down)
        self.measure = measure
        self.version = 0
        self.advice: dict[str, tuple[Advice, ...]] = {}
        self._leaves = self.network.parts
        self._part_of = {leaf: number for number, part in enumerate(self._leaves) for leaf in part}
        self._parts: dict[int, Part] = {}
        self._loads: dict[int, tuple[float, float]] = {}
        self._slots: dict[int, _Slot] = {}
        self._of_job: dict[str, list[int]] = {}
        self._local: dict[str, tuple[Route, ...]] = {}
        self._stranded: set[int] = set()
        self._next = 0

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs in the plan, in order of arrival."""
        return tuple(self._of_job)

    def arrive(self, job: str, flows: Sequence[Flow], *, advice: Sequence[Advice] = ()) -> Change:
        """Plan the `flows` of a new job. Raises TrafficError if it is there already, or a flow has no way."""
        slots, local = self._prepare(job, flows)
        by_part: dict[int, dict[int, tuple[str, str, float]]] = {}
        for number, slot in slots.items():
            by_part.setdefault(slot.part, {})[number] = (slot.source, slot.destination, slot.weight)
        self._admit(job, slots, local=local, advice=advice)
        for part, wanted in by_part.items():
            self._parts[part].add(wanted)
        return self._changed(by_part, fresh=slots, local=local)

    def extend(self, job: str, flows: Sequence[Flow], *, advice: Sequence[Advice] = ()) -> Change:
        """Plan further `flows` of a job that is there; none of its others moves unless it must. Raises TrafficError."""
        before = self._of_job.pop(job, None)
        local_before, advice_before = self._local.pop(job, ()), self.advice.pop(job, ())
        if before is None:
            raise TrafficError(f"job {job!r} is not in the plan")
        try:
            change = self.arrive(job, flows, advice=advice)
        finally:
            self._of_job[job] = [*before, *self._of_job.get(job, [])]
            self._local[job] = (*local_before, *self._local.get(job, ()))
            self.advice.setdefault(job, advice_before)
        return change

    def leave(self, job: str) -> Change:
        """Take a job out. Raises TrafficError if it is not there."""
        if job not in self._of_job:
            raise TrafficError(f"job {job!r} is not in the plan", remedy=f"planned: {', '.join(self.jobs) or 'none'}")
        by_part: dict[int, list[int]] = {}
        gone = self._of_job.pop(job)
        removed = len(self._local.pop(job)) + sum(len(self._slots[number].flows) for number in gone)
        for number in gone:
            part = self._slots.pop(number).part
            if number in self._stranded:
                self._stranded.discard(number)
            else:
                by_part.setdefault(part, []).append(number)
        self.advice.pop(job, None)
        for part, numbers in by_part.items():
            self._parts[part].remove(numbers)
        return self._changed(by_part, removed=removed)

    def set_down(self, names: Iterable[str]) -> Change:
        """Exactly these links and switches are down from now on. Raises TrafficError for an unknown name."""
        before = self.network.down
        self.network.set_down(names)
        return self._follow(before ^ self.network.down)

    def set_rates(self, rates: Mapping[str, float]) -> Change:
        """Exactly these links give only a share (0 to 1) of their capacity from now on: they carry fewer flows. Raises
        TrafficError for an unknown link."""
        before = self.network.rates
        self.network.set_rates(rates)
        return self._follow(name for name in {*before, *rates} if before.get(name) != rates.get(name))

    def _follow(self, names: Iterable[str]) -> Change:
        """Plan anew what uses these links and switches."""
        touched = self._touched(names)
        for part in touched:
            self._stranded.update(self._parts[part].follow_network())
        back: list[int] = []
        for number in sorted(self._stranded):
            slot = self._slots[number]
            if self._parts[slot.part].reachable(slot.source, slot.destination):
                self._parts[slot.part].add({number: (slot.source, slot.destination, slot.weight)})
                back.append(number)
        self._stranded.difference_update(back)
        return self._changed(touched, back=back)

    def restore(self, job: str, flows: Sequence[Flow], *, routes: Mapping[str, Way]) -> None:
        """Take a job over with the `routes` by flow name that a journal tells. Raises TrafficError if one is wrong.

        Flows whose way is down, or that have none, wait for a link to come back, as they did when it went.
        """
        slots, local = self._prepare(job, flows, kept=routes)
        ways: dict[int, Way] = {}
        for number, slot in slots.items():
            way = routes.get(slot.flows[0].name)
            if way is not None:
                hops = list(zip(way[0], way[0][1:], strict=False))
                ends = (way[0][0], way[0][-1]) == (slot.source, slot.destination)
                if not ends or not hops or any(self.network.cable(a, b) is None for a, b in hops):
                    raise TrafficError(f"the way kept for flow {slot.flows[0].name!r} does not fit the topology")
                if all(self.network.alive(a, b) for a, b in hops):
                    ways[number] = way
        self._admit(job, slots, local=local, advice=())
        for number, slot in slots.items():
            if number in ways:
                self._parts[slot.part].keep(number, ways[number], weight=slot.weight)
            else:
                self._stranded.add(number)
        for part in {slot.part for slot in slots.values()}:
            self._parts[part].settle()
            self._loads[part] = (self._parts[part].max_load, self._parts[part].bound)

    def flows(self, job: str) -> tuple[Flow, ...]:
        """The flows of a job that use links between leaves."""
        return tuple(flow for number in self._of_job.get(job, ()) for flow in self._slots[number].flows)

    def routes(self, job: str | None = None) -> tuple[Route, ...]:
        """All routes in force, or those of one job."""
        jobs = self.jobs if job is None else (job,)
        numbers = (number for name in jobs for number in self._of_job.get(name, ()))
        return (*self._named(numbers), *(route for name in jobs for route in self._local.get(name, ())))

    def plan(self) -> Plan:
        """The plan in force, whole."""
        top, bound = self._worst()
        methods = sorted({part.method for part in self._parts.values()})
        advice = tuple(line for lines in self.advice.values() for line in lines)
        gap = top / bound - 1 if bound else 0.0
        return Plan(self.version, self.measure, self.routes(), top, bound, gap, " and ".join(methods) or "none", advice)

    def _prepare(
        self, job: str, flows: Sequence[Flow], *, kept: Mapping[str, Way] | None = None
    ) -> tuple[dict[int, _Slot], tuple[Route, ...]]:
        """The slots of `flows` and the routes that stay in a leaf. Changes nothing, but makes parts not used before.

        With `kept` ways only flows of one way share a slot, and none needs to have a way now.
        """
        if job in self._of_job:
            raise TrafficError(f"job {job!r} is in the plan already", remedy="let it leave first")
        if not job or ":" in job or any(flow.job != job for flow in flows):
            raise TrafficError(f"{job!r} is no name of a job, or flows of another job are with it")
        local: list[Route] = []
        between: dict[tuple[str, str, Way | None], list[Flow]] = {}
        ways = {} if kept is None else kept
        for flow in flows:
            source, destination = self._leaf(flow.source, flow), self._leaf(flow.destination, flow)
            if source == destination:
                local.append(Route(flow.name, (source,)))
            else:
                between.setdefault((source, destination, ways.get(flow.name)), []).append(flow)
        for source, destination, _ in between:
            self._check_way(source, destination, now=kept is None)
        slots: dict[int, _Slot] = {}
        for (source, destination, _), members in between.items():
            for shared in _never_together(members):
                weight = max(flow.nbytes for flow in shared) / _GIGA if self.measure == "bytes" else 1.0
                slots[self._next + len(slots)] = _Slot(
                    job, source, destination, self._part_of[source], weight, tuple(shared)
                )
        return slots, tuple(local)

    def _leaf(self, name: str, flow: Flow) -> str:
        port = self.network.ports.get(name)
        if port is None or port.leaf not in self._part_of:
            raise TrafficError(f"flow {flow.name!r} uses port {name!r}, which is not plugged in anywhere")
        return port.leaf

    def _check_way(self, source: str, destination: str, *, now: bool) -> None:
        part = self._part_of[source]
        if part == self._part_of[destination]:
            if part not in self._parts:
                by_bytes = self.measure == "bytes"
                self._parts[part] = Part(self.network, self._leaves[part], by_bytes=by_bytes)
            if not now or self._parts[part].reachable(source, destination):
                return
        raise TrafficError(f"no way from {source!r} to {destination!r} is left; the plan in force stays")

    def _admit(
        self, job: str, slots: Mapping[int, _Slot], *, local: tuple[Route, ...], advice: Sequence[Advice]
    ) -> None:
        self._slots.update(slots)
        self._next += len(slots)
        self._of_job[job] = list(slots)
        self._local[job] = local
        self.advice[job] = tuple(advice)

    def _touched(self, names: Iterable[str]) -> set[int]:
        ends = {switch for name in names for link in self.network.links_of(name) for switch in link.split(">")}
        leaves = {part for switch in ends if (part := self._part_of.get(switch)) is not None}
        tall = any(self.network.tier[switch] > 2 for switch in ends)
        return {part for part in self._parts if tall or part in leaves}

    def _changed(
        self,
        parts: Iterable[int],
        *,
        fresh: Mapping[int, _Slot] | None = None,
        local: tuple[Route, ...] = (),
        removed: int = 0,
        back: Sequence[int] = (),
    ) -> Change:
        fresh = fresh or {}
        moved: list[int] = []
        for part in parts:
            moved += [slot for slot in self._parts[part].settle() if slot in self._slots and slot not in fresh]
            self._loads[part] = (self._parts[part].max_load, self._parts[part].bound)
        self.version += 1
        top, bound = self._worst()
        stranded = tuple(flow.name for number in sorted(self._stranded) for flow in self._slots[number].flows)
        added = sum(len(slot.flows) for slot in fresh.values()) + len(local)
        shifted = sum(len(self._slots[number].flows) for number in moved)
        routes = (*self._named(dict.fromkeys([*fresh, *moved, *back])), *local)
        return Change(added, removed, shifted, routes, stranded, top, bound)

    def _named(self, numbers: Iterable[int]) -> tuple[Route, ...]:
        found = []
        for number in numbers:
            if number not in self._stranded:
                slot = self._slots[number]
                path, cable = self._parts[slot.part].way(number)
                found += [Route(flow.name, path, cable) for flow in slot.flows]
        return tuple(found)

    def _worst(self) -> tuple[float, float]:
        """The largest load and the largest bound over all parts."""
        return (
            max((load for load, _ in self._loads.values()), default=0.0),
            max((bound for _, bound in self._loads.values()), default=0.0),
        )


def _never_together(flows: Sequence[Flow]) -> list[list[Flow]]:
    """As few lists as possible, each of flows whose active times do not overlap (interval partitioning)."""
    always = [[flow] for flow in flows if flow.end_s <= flow.start_s]
    timed = sorted((flow for flow in flows if flow.end_s > flow.start_s), key=lambda flow: flow.start_s)
    lists: list[list[Flow]] = []
    free: list[tuple[float, int]] = []
    for flow in timed:
        if free and free[0][0] <= flow.start_s:
            _, number = heapq.heappop(free)
        else:
            number = len(lists)
            lists.append([])
        lists[number].append(flow)
        heapq.heappush(free, (flow.end_s, number))
    return always + lists
