"""The known answer of every drill, and how findings compare with it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keepstep.records.drills import DrillRequest

QUIET = frozenset({"healthy", "imbalance", "undetermined"})
HANGS = frozenset({"freeze", "stop-data", "cut-link", "kill"})
STEPS_LIMIT, HANG_LIMIT_S = 10, 5.0

Suspect = tuple[str, Any]

_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    # the kind of finding, and the layers that may be named (none: what ended it cannot be known from inside)
    "kill": ("crash", ()),
    "freeze": ("noncommunication_hang", ()),
    "slow-compute": ("compute_slow", ("host_cpu", "hardware_gpu")),
    "busy-gil": ("compute_slow", ("application", "host_cpu")),
    "slow-data": ("compute_slow", ("dataloader",)),
    "stop-data": ("noncommunication_hang", ("dataloader",)),
    "throttle-link": ("communication_slow", ("hardware_link",)),
    "cut-link": ("communication_hang", ("hardware_link",)),
    "throttle-node": ("communication_slow", ("hardware_link",)),
    "mismatch": ("collective_mismatch", ("application",)),
    "never-start": ("startup_never_arrived", ()),
    "wrong-version": ("startup_disagrees", ("configuration", "software_library")),
    "throttle-state": ("communication_slow", ("hardware_link", "undetermined")),
    "corrupt-checkpoint": ("state_divergence", ("storage",)),
    "lose-node": ("crash", ()),
    "lose-domain": ("crash", ()),
    "bad-release": ("crash", ("software_library", "undetermined")),
    "flip-bit": ("state_divergence", ("hardware_gpu", "undetermined")),
}


@dataclass(frozen=True)
class Answer:
    """What a finding about one fault must say. `exact` is the set of suspects that nothing can split further."""

    fault: str
    kind: str
    layers: tuple[str, ...]
    exact: frozenset[Suspect]


def answer_of(request: DrillRequest) -> Answer:
    """The right finding for one drill of the nested job (8 ranks, two replicas: r and r + 4)."""
    kind, layers = _KINDS[request.fault]
    if request.fault == "bad-release" and request.how == "slow":
        kind = "compute_slow"
    if request.domain:
        exact: set[Suspect] = {("domain", request.domain)}
    elif request.fault == "throttle-state":
        exact = {("source", request.rank)}
    elif request.node:
        exact = {("node", request.node)}
    elif request.source is not None and request.destination is not None:
        exact = {("link", (request.source, request.destination))}
    elif request.fault == "flip-bit" and request.rank is not None:
        exact = {("rank", request.rank), ("rank", (request.rank + 4) % 8)}
    else:
        exact = {("rank", request.rank)}
    return Answer(request.fault, kind, layers, frozenset(exact))


class Verdict(NamedTuple):
    """One record of a finding as the journal has it."""

    number: int
    kind: str
    layer: str
    sets: tuple[frozenset[Suspect], ...]
    wall: float
    status: str


def verdict_of(record: dict[str, Any]) -> Verdict:
    """A journal line of a finding, or of an incident, which names the kind and the rank of a loss as well."""
    if record["record"] == "Incident":
        onset, detected = record.get("onset_wall") or record["wall"], record.get("detected") or 0.0
        lost = {("rank", rank) for rank in record.get("ranks") or [record.get("rank")]}
        sets = (frozenset({*lost, *({("node", record["node"])} if record.get("domain") else ())}),)
        return Verdict(-record.get("number", 0), record["kind"], "undetermined", sets, onset + detected, "new")
    named = tuple(frozenset(_suspect(one) for one in group) for group in record.get("suspects", ()))
    return Verdict(
        record.get("number", 0),
        record["kind"],
        record.get("layer", "undetermined"),
        named,
        record["wall"],
        record.get("status", "new"),
    )


def _suspect(record: dict[str, Any]) -> Suspect:
    """The one thing a suspect is: what it says first of node, link, side, coordinates and rank."""
    for name in ("link", "source", "destination", "domain", "rank", "node"):
        if name in record:
            value = record[name]
            return name, tuple(value) if isinstance(value, list) else value
    return "place", tuple(sorted(record.items()))


@dataclass
class Case:
    """One or two faults at once, when each began, all finding records of that time, and when steps began then."""

    name: str
    answers: list[Answer]
    began: list[float]
    factor: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    steps: Sequence[float] = ()


@dataclass(frozen=True)
class Score:
    """How one fault of a case was found: `seconds` from its injection to the verdict, and `steps` begun in between."""

    case: str
    fault: str
    factor: float
    found: bool
    exact: bool
    layer: bool | None
    seconds: float | None
    steps: int | None


def right(verdict: Verdict, answer: Answer) -> bool:
    """Whether a finding is of the kind and names what is at fault, alone or in a set."""
    named = frozenset().union(*verdict.sets)
    return verdict.kind == answer.kind and bool(named & answer.exact)


def scores(case: Case) -> list[Score]:
    """One score for every fault of a case."""
    return [_score(case, answer, began) for answer, began in zip(case.answers, case.began, strict=True)]


def _score(case: Case, answer: Answer, began: float) -> Score:
    hits = [v for v in case.verdicts if v.wall >= began and v.status != "ended" and right(v, answer)]
    seconds = hits[0].wall - began if hits else None
    return Score(
        case.name,
        answer.fault,
        case.factor,
        bool(hits),
        any(one == answer.exact for verdict in hits for one in verdict.sets),
        hits[-1].layer in answer.layers if hits and answer.layers else None,
        seconds,
        sum(began < at <= hits[0].wall for at in case.steps) if hits else None,
    )


def alarms(verdicts: Sequence[Verdict]) -> dict[int, Verdict]:
    """The last word on every finding that blames somebody or something, by number."""
    return {v.number: v for v in verdicts if v.kind not in QUIET and v.status != "ended"}


def wrong_alarms(case: Case) -> list[Verdict]:
    """Findings of a case that are about none of its faults."""
    return [v for v in alarms(case.verdicts).values() if not any(right(v, answer) for answer in case.answers)]


def blames(verdict: Verdict) -> bool:
    """Whether an alarm of a healthy job is a false one: a stall of everybody's data that names nobody is none."""
    return verdict.kind not in QUIET and not (verdict.layer in ("storage", "dataloader") and not any(verdict.sets))


def false_alarms(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Every time that a finding of a healthy job began to blame, in order; one that ended may begin again."""
    standing: set[int] = set()
    begun = []
    for verdict in verdicts:
        if verdict.status == "ended" or not blames(verdict):
            standing.discard(verdict.number)
        elif verdict.number not in standing:
            standing.add(verdict.number)
            begun.append(verdict)
    return begun


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927); (0, 1) for nothing counted."""
    if count == 0:
        return 0.0, 1.0
    share, square = hits / count, z * z
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def bootstrap(values: Sequence[float], *, seed: int = 1, draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    source = random.Random(seed)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))]


def poisson(count: int, exposure: float) -> tuple[float, float]:
    """The 95 % interval of a rate (Garwood 1936) for `count` events in `exposure`."""
    from scipy.stats import chi2

    low = chi2.ppf(0.025, 2 * count) / 2 / exposure if count else 0.0
    return float(low), float(chi2.ppf(0.975, 2 * count + 2) / 2 / exposure)
