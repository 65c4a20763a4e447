"""What the commands of `keepstep traffic` do: read files, plan, model, price, export, change a site."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.errors import TrafficError, UsageError
from keepstep.intake.hostlist import expand_hosts
from keepstep.records.topology import Topology
from keepstep.service.clock import SystemClock
from keepstep.service.traffic_files import load_demands, write_text
from keepstep.service.traffic_records import observed_run
from keepstep.service.traffic_site import TrafficSite, history, total_crossing
from keepstep.service.traffic_text import history_text, plan_text
from keepstep.traffic.advice import worth_planning
from keepstep.traffic.checking import checked
from keepstep.traffic.collision import CollisionCost, collision_cost
from keepstep.traffic.drawing import draw
from keepstep.traffic.flows import flows_of
from keepstep.traffic.hashing import hashed_routes
from keepstep.traffic.model import Comparison, compare, model
from keepstep.traffic.nccl_settings import NcclSettings, nccl_settings
from keepstep.traffic.network import Network
from keepstep.traffic.observed import Observed
from keepstep.traffic.planner import Planner
from keepstep.traffic.stages import StagePolicy

__all__ = ["SiteChanges", "change_site", "exported", "modelled_jobs", "plan_jobs", "priced_run"]


class SiteChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be changed at a site, done in this order: start, links, departures, arrivals, outcome."""

    topology: Topology | None = None
    by_bytes: bool = False
    down: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    arrive: tuple[Path, ...] = ()
    everything: bool = False
    outcome: float | None = None


def plan_jobs(
    topology: Topology, files: Sequence[Path], *, down: Sequence[str], parts: int, by_bytes: bool, everything: bool
) -> Planner:
    """A plan of the jobs in `files`, in their order. Raises RecordError and TrafficError."""
    planner = Planner(checked(topology), measure="bytes" if by_bytes else "flows", down=down)
    demands = load_demands(files)
    crossing = {demand.job: worth_planning(demand, planner.network, parts=parts).crossing for demand in demands}
    for demand in demands:
        others = total_crossing(count for job, count in crossing.items() if job != demand.job)
        worth = worth_planning(demand, planner.network, others=others, parts=parts)
        wanted = {one.use for one in worth.advice if one.plan}
        uses = [use for use in demand.uses if everything or use.name in wanted]
        flows = flows_of(demand, planner.network, uses=uses, parts=parts)
        planner.arrive(demand.job, flows, advice=() if everything else worth.advice)
    return planner


def modelled_jobs(planner: Planner, *, seeds: int, efficiency: float) -> tuple[Comparison, ...]:
    """Planned against hashed for every job of a plan."""
    flows = [flow for job in planner.jobs for flow in planner.flows(job)]
    if not flows:
        raise TrafficError("no flow of these jobs leaves its leaf; there is nothing to compare")
    return compare(flows, planner.routes(), network=planner.network, seeds=range(seeds), efficiency=efficiency)


def priced_run(
    run: Path, topology: Topology, *, job: str, hosts: str, steps: int, choice: tuple[int, float]
) -> tuple[Observed, CollisionCost]:
    """What a recorded run sent, and the price of its collisions; `choice` is the number of seeds and the efficiency."""
    seeds, efficiency = choice
    observed = observed_run(run, job=job, hosts=expand_hosts(hosts))
    planner = Planner(checked(topology))
    planner.arrive(job, flows_of(observed.demand, planner.network))
    flows = [*planner.flows(job)]
    if not flows:
        raise UsageError("nothing that was recorded leaves a leaf of this topology", remedy="see --hosts")
    network = planner.network
    ideal = model(flows, planner.routes(), network=network, efficiency=efficiency)
    hashed = [
        model(flows, hashed_routes(flows, network, seed=seed), network=network, efficiency=efficiency)
        for seed in range(seeds)
    ]
    return observed, collision_cost(observed, ideal, actual=hashed, steps=steps or observed.steps)


def exported(
    planner: Planner, files: Sequence[Path], *, traffic_class: int | None, topology_file: Path | None
) -> list[NcclSettings]:
    """NCCL's settings for every job of a plan."""
    found = []
    for demand in load_demands(files):
        hosts = list(dict.fromkeys(seat.host for seat in demand.seats))
        routes = planner.routes(demand.job)
        one = nccl_settings(demand.job, hosts, network=planner.network, routes=routes, traffic_class=traffic_class)
        if topology_file is not None:
            reason = "the host's own file, as it was given"
            one = msgspec.structs.replace(
                one,
                environment=one.environment | {"NCCL_TOPO_FILE": str(topology_file)},
                reasons=one.reasons | {"NCCL_TOPO_FILE": reason},
            )
        found.append(one)
    return found


def change_site(
    directory: Path, changes: SiteChanges, *, stage: StagePolicy, svg: Path | None
) -> tuple[dict[str, Any], str]:
    """Change a site and say what is in force: as values and as text. Raises where `TrafficSite` does."""
    clock = SystemClock()
    if changes.outcome is not None and not (math.isfinite(changes.outcome) and changes.outcome > 0):
        raise UsageError(f"an outcome of {changes.outcome:g}; it is hashed time / planned time, such as 1.4")
    demands = load_demands(changes.arrive)
    if changes.topology is not None:
        measure = "bytes" if changes.by_bytes else "flows"
        site = TrafficSite.create(directory, changes.topology, measure=measure, clock=clock)  # type: ignore[arg-type]
    else:
        site = TrafficSite.open(directory, clock)
    notes: list[str] = []
    try:
        if changes.down or changes.up:
            before = site.planner.network.down
            site.set_links(down=changes.down, up=changes.up)
            notes = _unchanged(changes, site.planner.network, before=before)
        for job in changes.leave:
            site.leave(job)
        for demand in demands:
            site.arrive(demand, stage=stage, everything=changes.everything)
        if changes.outcome is not None:
            site.outcome(changes.outcome)
        plan = site.planner.plan()
        text = "\n".join([*notes, plan_text(site.planner, plan)])
        if svg is not None:
            write_text(svg, draw(site.planner.network, plan.routes, bound=plan.bound, title=f"site {directory.name}"))
    finally:
        site.close()
    told = history(directory)
    body = {"notes": notes, "plan": plan, "changes": told.changes, "outcomes": told.outcomes}
    return body, f"{text}\n\n{history_text(told.changes, told.outcomes)}"


def _unchanged(changes: SiteChanges, network: Network, *, before: Collection[str]) -> list[str]:
    """Why some of the names changed nothing, where `before` were down: a line each."""
    lines = [f"note: {name} was down already; nothing changed" for name in changes.down if name in before]
    for name in changes.up:
        if name not in before:
            links = set(network.links_of(name))
            near = [other for other in sorted(before) if links.intersection(network.links_of(other))]
            lines.append(f"note: {name} was not down{_but(near)}; nothing changed")
    return lines


def _but(down: Sequence[str]) -> str:
    return f", but {', '.join(down)} {'is' if len(down) == 1 else 'are'}" if down else ""
