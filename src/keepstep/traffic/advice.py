"""When not to plan: collectives that are too short, data-dependent, inside one leaf, or too few to collide.

For these the answer is "spread locally": let the switches hash, or spray packets. The reason and the numbers it rests
on are part of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from keepstep.errors import TrafficError
from keepstep.records.demand import CollectiveUse, Demand, Flow
from keepstep.records.plan import Advice
from keepstep.traffic.flows import flows_of
from keepstep.traffic.hashing import expected_fullest
from keepstep.traffic.network import Network

__all__ = ["Policy", "Worth", "worth_planning"]

_BITS = 8e-9
_Window = tuple[float, float]
"""When in the step flows are active, from and to."""
_ALWAYS = (0.0, 0.0)


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds. A call shorter than `min_call_s` ends before a queue builds up; a gain below `min_gain` of the
    step (or, where the step's time is unknown, of the collective's own) is not worth fixed paths."""

    min_call_s: float = 200e-6
    min_gain: float = 0.01


class Worth(msgspec.Struct, frozen=True):
    """The flows that deserve a plan, advice for every collective, the regular flows that leave each leaf at once."""

    flows: tuple[Flow, ...]
    advice: tuple[Advice, ...]
    crossing: dict[str, int]


def worth_planning(
    demand: Demand,
    network: Network,
    *,
    policy: Policy | None = None,
    others: Mapping[str, int] | None = None,
    parts: int = 1,
) -> Worth:
    """What of `demand` is worth a plan. `others`: flows of other jobs that leave each leaf, planned or not. `parts`: as
    in `flows_of`.

    Raises TrafficError as `flows_of`, and where a leaf has no uplink left.
    """
    policy = policy or Policy()
    regular = [use for use in demand.uses if not use.data_dependent]
    by_use: dict[str, list[Flow]] = {use.name: [] for use in demand.uses}
    leaving: dict[str, Counter[_Window]] = {}
    crossed: set[str] = set()
    for flow in flows_of(demand, network, uses=regular, parts=parts):
        by_use[flow.use].append(flow)
        source, destination = _leaf(network, flow.source), _leaf(network, flow.destination)
        if source != destination:
            leaving.setdefault(source, Counter())[flow.start_s, flow.end_s] += 1
            crossed |= {source, destination}
    _check_uplinks(network, crossed, job=demand.job)
    chosen: list[Flow] = []
    advice = []
    for use in demand.uses:
        inputs = _inputs(use, by_use[use.name], demand=demand, network=network, leaving=leaving)
        inputs["other_flows_on_leaf"] = float(_most(by_use[use.name], network, others=others or {}))
        answer = _judge(use, inputs, policy=policy, job=demand.job)
        advice.append(answer)
        if answer.plan:
            chosen += by_use[use.name]
    crossing = {leaf: _at_once(windows, _ALWAYS) for leaf, windows in leaving.items()}
    return Worth(tuple(chosen), tuple(advice), crossing)


def _check_uplinks(network: Network, leaves: set[str], *, job: str) -> None:
    for leaf in sorted(leaves):
        if not any(network.alive(leaf, upper) and network.alive(upper, leaf) for upper in network.uppers[leaf]):
            raise TrafficError(f"job {job!r} has flows through {leaf!r}, which has no uplink left")


def _judge(use: CollectiveUse, inputs: dict[str, float], *, policy: Policy, job: str) -> Advice:
    def say(plan: bool, reason: str) -> Advice:
        return Advice(job, use.name, plan, reason if plan else f"spread locally: {reason}", inputs)

    if len(use.ranks) < 2:
        return say(False, "its groups have one rank each, which sends nothing")
    if use.data_dependent:
        return say(False, "who sends how much depends on the data; a fixed path would be wrong at the next step")
    if not inputs["flows"]:
        return say(False, "all of it stays inside a host")
    if not inputs["flows_leaving_leaf"]:
        return say(False, "it stays inside one leaf, no uplink is shared")
    if inputs["call_s"] < policy.min_call_s:
        return say(False, f"one call takes {inputs['call_s'] * 1e6:.0f} us, below {policy.min_call_s * 1e6:.0f} us")
    flows = int(inputs["flows_leaving_leaf"] + inputs["other_flows_on_leaf"])
    spines = int(inputs["spines"])
    best = -(-flows // spines) if spines else 1
    inputs["expected_slowdown"] = slowdown = expected_fullest(flows, spines) / best if spines else 1.0
    saved = inputs["transfer_s"] * (slowdown - 1)
    inputs["gain"] = gain = saved / (inputs["step_s"] or inputs["transfer_s"] * slowdown)
    if gain < policy.min_gain:
        few = (
            f"{flows} flow{'s' * (flows != 1)} on {spines} uplinks"
            if slowdown < 1.2
            else "little of the step is transfer"
        )
        return say(False, f"{few}: hashing costs {gain:.2%} of the time, below {policy.min_gain:.0%}")
    return say(True, f"hashing {flows} flows on {spines} uplinks would cost {gain:.1%} of the time")


def _inputs(
    use: CollectiveUse,
    flows: list[Flow],
    *,
    demand: Demand,
    network: Network,
    leaving: Mapping[str, Mapping[_Window, int]],
) -> dict[str, float]:
    """The numbers behind an advice; times in s, for an empty network."""
    leaves = {
        _leaf(network, flow.source) for flow in flows if _leaf(network, flow.source) != _leaf(network, flow.destination)
    }
    window = (use.start_s, use.end_s)
    busiest = max(sorted(leaves), key=lambda leaf: _at_once(leaving[leaf], window), default="")
    edges: dict[tuple[str, str], float] = {}
    for flow in flows:  # the parts of an edge share its ports
        ends = (flow.source, flow.destination)
        edges[ends] = edges.get(ends, 0.0) + flow.nbytes
    seconds = max((nbytes * _BITS / network.ports[source].gbps for (source, _), nbytes in edges.items()), default=0.0)
    uplinks = network.uppers.get(busiest, {})
    return {
        "flows": float(len(flows)),
        "flows_leaving_leaf": float(_at_once(leaving[busiest], window)) if busiest else 0.0,
        "spines": float(sum(cable.count for upper, cable in uplinks.items() if network.alive(busiest, upper))),
        "transfer_s": seconds,
        "call_s": seconds / use.calls if use.calls else 0.0,
        "step_s": demand.step_s,
    }


def _at_once(windows: Mapping[_Window, int], during: _Window) -> int:
    """How many flows are active at the busiest moment of `during`; a window without length is always."""

    def always(window: _Window) -> bool:
        return window[1] <= window[0]

    begins = {max(start, during[0]) for start, _ in windows} if not always(during) else {start for start, _ in windows}
    moments = [begin for begin in begins if always(during) or begin < during[1]]
    counts = (
        sum(count for one, count in windows.items() if always(one) or one[0] <= moment < one[1]) for moment in moments
    )
    return max(counts, default=0)


def _most(flows: list[Flow], network: Network, *, others: Mapping[str, int]) -> int:
    return max((others.get(_leaf(network, flow.source), 0) for flow in flows), default=0)


def _leaf(network: Network, port: str) -> str:
    return network.ports[port].leaf
