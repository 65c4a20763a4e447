"""Which measurement would split the suspects of a finding, and what is left of them once it was made. Pure.

Links: small transfers between pairs of ranks, one after the other. A directed link, the sending side or the receiving
side of a rank, and a whole rank each predict which pairs are slow; those that predict what was measured are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from keepstep.records.finding import Finding, FindingKind, Layer, Suspect
from keepstep.records.finding_words import ranks_of

__all__ = ["NodeResult", "PairResult", "ProbePlan", "narrowed", "plan_probe"]

_Pair = tuple[int, int]

_MOST_PAIRS = 24
_WITNESSES = 2
_SLOW_SHARE = 0.6
_SAME_FAULT = 4.0
"""A transfer below `_SLOW_SHARE` of the usual rate is slow, unless it is more than `_SAME_FAULT` times as fast as the
slowest: that is what training beside it, and answers over a slow link, make of a good one."""
_NODE_SHARE = 0.85


class ProbePlan(msgspec.Struct, frozen=True):
    """What to measure: transfers between `pairs`; processor speed or reading of files on the nodes of `ranks`; or the
    stacks of `ranks`."""

    kind: Literal["links", "cpu", "read", "stacks"]
    pairs: tuple[_Pair, ...] = ()
    ranks: tuple[int, ...] = ()


class PairResult(msgspec.Struct, frozen=True):
    """One transfer from `source` to `destination`; `bytes_per_s` is 0 where it failed because of `why`."""

    source: int
    destination: int
    latency_s: float
    bytes_per_s: float
    why: str = ""


class NodeResult(msgspec.Struct, frozen=True):
    """One measurement on the node of `rank`: `value` in `unit` (more is better), or words alone in `note`."""

    rank: int
    node: str
    value: float
    unit: str = ""
    note: str = ""


def plan_probe(finding: Finding, world: int) -> ProbePlan | None:
    """The measurement for `finding` in a job of `world` ranks; None where there is nothing that a probe could split."""
    if finding.kind in ("communication_slow", "communication_hang"):
        pairs = _pairs(finding, world)
        return ProbePlan("links", pairs=pairs) if pairs else None
    ranks = ranks_of(finding)
    if not ranks or finding.kind in ("crash", "healthy"):
        return None
    others = tuple(rank for rank in range(world) if rank not in ranks)[:_WITNESSES]
    if finding.kind == "compute_slow":
        return ProbePlan("read" if finding.layer in ("dataloader", "storage") else "cpu", ranks=ranks[:8] + others)
    return ProbePlan("stacks", ranks=ranks[:8] + others)


def narrowed(
    finding: Finding, plan: ProbePlan, *, pairs: Sequence[PairResult] = (), nodes: Sequence[NodeResult] = ()
) -> Finding:
    """`finding` after the probe: as a new finding that refers to it, with the measurements as evidence."""
    if plan.kind == "links":
        kind, suspects, sure, words = _after_links(finding, pairs)
        layer = finding.layer
    else:
        kind, suspects, sure, layer, words = _after_nodes(finding, plan, results=nodes)
    return msgspec.structs.replace(
        finding,
        kind=kind,
        layer=layer,
        suspects=suspects,
        confidence=sure,
        evidence=(f"probe of finding {finding.number}: {plan.kind}", *words),
        next_probe="" if len(suspects) == 1 and len(suspects[0]) == 1 else finding.next_probe,
        number=0,
        status="new",
        refers=finding.number,
        bundle="",
    )


# ---------------------------------------------------------------- links


def _pairs(finding: Finding, world: int) -> tuple[_Pair, ...]:
    """The suspected links, and as many others as tell their ends apart."""
    links = [s.link for group in finding.suspects for s in group if s.link is not None]
    sources = [s.source for group in finding.suspects for s in group if s.source is not None]
    ends = [s.destination for group in finding.suspects for s in group if s.destination is not None]
    ranks = ranks_of(finding)
    touched = {*sources, *ends, *ranks, *(rank for link in links for rank in link)}
    free = [rank for rank in range(world) if rank not in touched]
    witnesses = (free or list(range(world)))[: _WITNESSES + 1]
    wanted: list[_Pair] = [(a, b) for a, b in links]
    for a, b in links:
        wanted += [pair for w in witnesses[:_WITNESSES] for pair in ((a, w), (w, b))]
        wanted.append((b, a))
    for rank in (*sources, *ranks):
        wanted += [(rank, w) for w in witnesses]
    for rank in (*ends, *ranks):
        wanted += [(w, rank) for w in witnesses]
    wanted += [(a, b) for a in witnesses for b in witnesses]
    kept = [pair for pair in dict.fromkeys(wanted) if pair[0] != pair[1] and max(pair) < world]
    return tuple(kept[:_MOST_PAIRS])


def _after_links(
    finding: Finding, results: Sequence[PairResult]
) -> tuple[FindingKind, tuple[tuple[Suspect, ...], ...], float, list[str]]:
    rates = {(r.source, r.destination): r.bytes_per_s for r in results}
    words = [_pair_words(result) for result in results]
    if not rates:
        return finding.kind, finding.suspects, finding.confidence, ["no transfer was measured"]
    usual = _usual(finding, {pair: rate for pair, rate in rates.items() if rate > 0})
    if not usual:
        return "undetermined", (), 0.5, ["no transfer came through: there is nothing to compare with", *words]
    worst = min(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < _SLOW_SHARE * usual and rate <= _SAME_FAULT * worst}
    if not slow:
        words.insert(
            0, f"every transfer reached at least {_SLOW_SHARE:.0%} of the usual {_rate(usual)}: nothing is slow now"
        )
        return "undetermined", (), 0.5, words
    fits = _fitting(slow, rates)
    words.insert(0, f"slow against the usual {_rate(usual)}: " + ", ".join(f"{a}->{b}" for a, b in sorted(slow)))
    sure = 0.95 if len(fits) == 1 else 0.85
    return finding.kind, (tuple(fits),), sure, words


def _usual(finding: Finding, rates: Mapping[_Pair, float]) -> float:
    """What transfers that came through reach, those that the finding suspects left aside where there are others."""
    suspected = {pair for pair in rates if any(_predicts(s, pair) for group in finding.suspects for s in group)}
    return median([rate for pair, rate in rates.items() if pair not in suspected] or list(rates.values()) or [0.0])


def _fitting(slow: set[_Pair], measured: Iterable[_Pair]) -> list[Suspect]:
    """What predicts the slow pairs best; the smallest thing where several predict the same."""
    pairs = list(measured)
    things = [Suspect(link=pair) for pair in sorted(slow)]
    things += [Suspect(source=rank) for rank in sorted({a for a, _ in slow})]
    things += [Suspect(destination=rank) for rank in sorted({b for _, b in slow})]
    things += [Suspect(rank=rank) for rank in sorted({rank for pair in slow for rank in pair})]

    def fit(thing: Suspect) -> float:
        said = {pair for pair in pairs if _predicts(thing, pair)}
        return len(said & slow) / len(said | slow)

    best = max(fit(thing) for thing in things)
    fits = [thing for thing in things if fit(thing) == best]
    if best < 1.0 and len(slow) > 1:  # no single thing explains it all: the slow links themselves are left
        return [Suspect(link=pair) for pair in sorted(slow)]
    return fits


def _predicts(thing: Suspect, pair: _Pair) -> bool:
    if thing.link is not None:
        return thing.link == pair
    if thing.source is not None:
        return thing.source == pair[0]
    if thing.destination is not None:
        return thing.destination == pair[1]
    return thing.rank is not None and thing.rank in pair


def _pair_words(result: PairResult) -> str:
    name = f"{result.source}->{result.destination}"
    if result.why:
        return f"{name}: {result.why}"
    return f"{name}: {_rate(result.bytes_per_s)}, {result.latency_s * 1e3:.2f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s >= 1e5 else f"{bytes_per_s / 1e3:.1f} kB/s"


# ---------------------------------------------------------------- nodes


def _after_nodes(
    finding: Finding, plan: ProbePlan, *, results: Sequence[NodeResult]
) -> tuple[FindingKind, tuple[tuple[Suspect, ...], ...], float, Layer, list[str]]:
    words = [_node_words(result) for result in results]
    same = (finding.kind, finding.suspects, finding.confidence)
    if plan.kind == "stacks" or not results:
        return (*same, finding.layer, words or ["nothing was measured"])
    suspects = set(ranks_of(finding))
    theirs = [r.value for r in results if r.rank in suspects and r.value > 0]
    others = [r.value for r in results if r.rank not in suspects and r.value > 0]
    if not theirs or not others:
        return (*same, finding.layer, ["too little was measured to compare", *words])
    nodes = _by_node(results, suspects)
    if min(theirs) < _NODE_SHARE * median(others):
        if not nodes and plan.kind == "cpu":
            said = (
                "ranks that are not slow share the node: what was measured there is chance, and says nothing about it"
            )
            return (*same, finding.layer, [said, *words])
        layer: Layer = "storage" if plan.kind == "read" else "host_cpu"
        left = tuple((Suspect(node=node),) for node in nodes) or finding.suspects
        what = (
            "the node itself is slower than others" if nodes else "its files are read more slowly than those of others"
        )
        return finding.kind, left, 0.9, layer, [f"{what}: {layer}", *words]
    layer = "dataloader" if plan.kind == "read" else "application"
    what = "reads files" if plan.kind == "read" else "computes"
    return finding.kind, finding.suspects, 0.8, layer, [f"the node {what} as fast as others: {layer}", *words]


def _by_node(results: Sequence[NodeResult], suspects: set[int]) -> list[str]:
    """Nodes that hold suspects alone."""
    ranks: Mapping[str, set[int]] = {r.node: {o.rank for o in results if o.node == r.node} for r in results}
    return sorted(node for node, there in ranks.items() if there <= suspects)


def _node_words(result: NodeResult) -> str:
    value = f"{result.value:.3g} {result.unit}" if result.unit else ""
    return f"rank {result.rank} on {result.node}: " + ", ".join(part for part in (value, result.note) if part)
