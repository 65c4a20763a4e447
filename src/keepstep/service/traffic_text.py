"""Topologies, plans and models in words and tables, for the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from keepstep.records.plan import Advice, Plan, TrafficChange, TrafficOutcome
from keepstep.records.topology import Topology
from keepstep.traffic.collision import CollisionCost
from keepstep.traffic.model import Comparison
from keepstep.traffic.network import Network
from keepstep.traffic.planner import Planner
from keepstep.traffic.published import PublishedFigure

__all__ = [
    "change_text",
    "comparison_text",
    "cost_text",
    "history_text",
    "plan_text",
    "published_text",
    "topology_text",
]

_TIERS = {1: "leaves", 2: "spines", 3: "cores"}
_MOST_ROWS = 40


def topology_text(topology: Topology, problems: Sequence[str] = ()) -> str:
    """What the network is made of, a row for each leaf (the first 40)."""
    tiers = Counter(switch.tier for switch in topology.switches)
    lines = [f"{topology.name}: {topology.source or 'topology'}"]
    lines.append(f"  {len(topology.hosts)} hosts, {len(topology.ports)} NIC ports{_nic_words(topology)}")
    for tier, count in sorted(tiers.items()):
        lines.append(f"  {count} {_TIERS.get(tier, f'switches of tier {tier}')}")
    cables = sum(cable.count for cable in topology.cables)
    if cables:
        speeds = sorted({cable.gbps for cable in topology.cables})
        lines.append(f"  {cables} cables of {', '.join(f'{speed:g}' for speed in speeds[:4])} Gbit/s")
    lines += [f"  note: {note}" for note in topology.notes]
    lines += [f"  problem: {problem}" for problem in problems]
    if not problems and topology.switches:
        lines += ["", *_leaf_table(topology)]
    return "\n".join(lines)


def _nic_words(topology: Topology) -> str:
    rails = {port.rail for port in topology.ports}
    sides = {port.side for port in topology.ports}
    words = f" of {', '.join(f'{gbps:g}' for gbps in sorted({port.gbps for port in topology.ports})[:4])} Gbit/s"
    words += f", {len(rails)} rails" if len(rails) > 1 else ""
    return words + (", two ports a NIC" if len(sides) > 1 else "")


def _leaf_table(topology: Topology) -> list[str]:
    network = Network(topology)
    hosts: dict[str, dict[str, float]] = {}
    for port in topology.ports:
        entry = hosts.setdefault(port.leaf, {})
        entry[port.host] = entry.get(port.host, 0.0) + port.gbps
    leaves = [switch for switch in topology.switches if switch.tier == 1]
    width = max((len(switch.name) for switch in leaves[:_MOST_ROWS]), default=4)
    lines = [f"{'leaf':{width}}  hosts  down Gbit/s  uplinks  up Gbit/s  down:up  domains"]
    for switch in leaves[:_MOST_ROWS]:
        ups = network.uppers[switch.name].values()
        below, above = sum(hosts.get(switch.name, {}).values()), sum(cable.gbps * cable.count for cable in ups)
        ratio = f"{below / above:.2g}:1" if above else "-"
        links = sum(cable.count for cable in ups)
        count = len(hosts.get(switch.name, {}))
        row = f"{switch.name:{width}}  {count:5}  {below:11g}  {links:7}  {above:9g}  {ratio:>7}"
        lines.append(f"{row}  {', '.join(switch.domains)}".rstrip())
    if len(leaves) > _MOST_ROWS:
        lines.append(f"... and {len(leaves) - _MOST_ROWS} more leaves")
    return lines


def plan_text(planner: Planner, plan: Plan, *, routes: bool = False) -> str:
    """The plan in force: how good it is, what is left to hashing and why; every route if asked for."""
    unit = "GB a step on a cable" if plan.measure == "bytes" else "flows on a cable"
    crossing = sum(len(route.path) > 1 for route in plan.routes)
    lines = [f"plan version {plan.version}, {len(planner.jobs)} jobs: {', '.join(planner.jobs) or 'none'}"]
    lines.append(f"  {crossing} flows planned between leaves, {len(plan.routes) - crossing} inside a leaf")
    if crossing:
        unequal = len({cable.gbps for cable in planner.network.topology.cables}) > 1
        unit += " of the fastest kind (slower ones in proportion)" if unequal else ""
        lines.append(f"  at most {plan.max_load:.4g} {unit}; no plan has fewer than {plan.bound:.4g}")
        lines.append(f"  by {plan.method}, gap {plan.gap:.1%}")
    if planner.network.down:
        lines.append(f"  down: {', '.join(sorted(planner.network.down))}")
    lines += _advice_lines(plan.advice)
    if routes:
        lines += ["", *(f"{route.flow}  {' > '.join(route.path)}{_cable(route.cable)}" for route in plan.routes)]
    return "\n".join(lines)


def _cable(cable: int) -> str:
    return f" (cable {cable})" if cable else ""


def _advice_lines(advice: Iterable[Advice]) -> list[str]:
    """One line for each job, reason and kind of collective."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in advice:
        groups.setdefault((one.job, one.reason), []).append(one.use)
    lines = []
    for (job, reason), uses in groups.items():
        names = ", ".join(uses[:3]) + (f" and {len(uses) - 3} more" if len(uses) > 3 else "")
        lines.append(f"  {job}: {names}: {reason}")
    return lines


def change_text(change: TrafficChange) -> str:
    """One change in a line."""
    words = f"version {change.version}: {change.change} {change.job}".rstrip()
    if change.change in ("arrive", "leave", "fail", "restore"):
        verb = "" if change.applied else "would be "
        words += f": {verb}{change.added} added, {change.removed} removed, {change.moved} moved; "
        words += f"at most {change.max_load:g} on a cable, bound {change.bound:g}"
    if change.links:
        words += f"; down now: {', '.join(change.links)}"
    if change.predicted is not None:
        words += f"; modelled gain over hashing {change.predicted:.2f}x"
    return words + (f" [{change.reason}]" if change.reason else "")


def history_text(changes: Iterable[TrafficChange], outcomes: Iterable[TrafficOutcome]) -> str:
    """All changes of a site, then what came of them."""
    lines = [change_text(change) for change in changes]
    for one in outcomes:
        predicted = "-" if one.predicted is None else f"{one.predicted:.2f}x"
        measured = "-" if one.measured is None else f"{one.measured:.2f}x"
        lines.append(
            f"outcome of version {one.version} ({one.job}): modelled {predicted}, measured {measured} {one.note}"
        )
    return "\n".join(line.rstrip() for line in lines)


def comparison_text(comparisons: Sequence[Comparison], seeds: int) -> str:
    """Planned against hashed, a row for each job. All figures are modelled."""
    width = max((len(one.job) for one in comparisons), default=3)
    lines = [f"modelled, hashing with {seeds} seeds: lowest, median, highest"]
    lines.append(f"{'job':{width}}  planned ms  hashed ms                gain   planned Gbit/s  hashed Gbit/s")
    for one in comparisons:
        low, middle, high = (1000 * value for value in one.hashed_s)
        slow, usual, fast = one.hashed_gbps
        lines.append(
            f"{one.job:{width}}  {1000 * one.planned_s:10.2f}  {low:.2f} {middle:.2f} {high:.2f}  "
            f"{one.gain:5.2f}x  {one.planned_gbps:14.1f}  {slow:.1f} {usual:.1f} {fast:.1f}"
        )
    return "\n".join(lines)


def cost_text(cost: CollisionCost) -> str:
    """What collisions cost a recorded job."""
    low, middle, high = cost.collision_s
    lines = [
        f"job {cost.job}, per step of a rank:",
        f"  measured: {1000 * cost.measured_s:.3f} ms in collectives between hosts, "
        f"{1000 * cost.wait_s:.3f} ms of it waiting",
        f"  modelled without collisions: {1000 * cost.ideal_s:.3f} ms",
    ]
    if not cost.fits:
        text = "  the model does not fit: the run took less than it gives without collisions, so none can be priced;"
        return "\n".join([*lines, f"{text} see capacities, hosts and --efficiency"])
    lines += [
        f"  caused by collisions: {1000 * middle:.3f} ms ({1000 * low:.3f} to {1000 * high:.3f}), "
        f"{cost.share[1]:.0%} of the wait ({cost.share[0]:.0%} to {cost.share[2]:.0%})",
        f"  over {cost.steps} steps of {cost.gpus} GPUs: {cost.gpu_hours[1]:.3g} GPU-hours "
        f"({cost.gpu_hours[0]:.3g} to {cost.gpu_hours[2]:.3g})",
    ]
    return "\n".join(lines)


def published_text(figures: Sequence[PublishedFigure]) -> str:
    """Modelled figures beside the published ones."""
    width = max(len(one.name) for one in figures)
    lines = [f"{'Gbit/s':{width}}  modelled: lowest, median, highest   published (second-hand)"]
    for one in figures:
        low, middle, high = one.modelled
        lines.append(f"{one.name:{width}}  {low:10.1f} {middle:10.1f} {high:10.1f}      {one.published}")
    return "\n".join(lines)
