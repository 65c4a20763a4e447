"""How well faults are named: real drills on eight ranks in nested groups, and steps that are healthy but uneven.

Compute is calibrated waiting (two cores run eight ranks honestly), collectives are real. Every drill's answer is known
(`drill_answers.py`); a finding counts as right if its kind is right and it names what is at fault, alone or in a set;
`exact set` is the share whose set is the smallest that anything could name. `--kinds` chooses drills, or `healthy`,
`two` (two faults at once), `real` (two ranks that really compute).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drill_answers import (
    HANG_LIMIT_S,
    HANGS,
    STEPS_LIMIT,
    Answer,
    Case,
    Score,
    alarms,
    answer_of,
    bootstrap,
    false_alarms,
    poisson,
    right,
    scores,
    verdict_of,
    wilson,
    wrong_alarms,
)
from drill_driver import Failed, Job
from harness import Result, options, report

from keepstep.records.drills import DrillRequest

WORLD = 8
PEERS = (1, 2, 4)  # in rank xor: tensor, pipeline and data neighbour
SETTLE_STEPS = 25
SLOW_WATCH_S, HANG_WATCH_S, ENDING_S = 4.0, 9.0, 12.0
FACTORS = (1.05, 1.1, 1.2, 1.3, 2.0)
NAMES = ("Finding", "Incident")
OBSERVE = ("--on-hang", "observe")
HEALTHY = (
    "compile",
    "healthy",
    "sequence",
    "last-stage",
    "gc",
    "rotating",
    "save",
    "validate",
    "recompile",
    "data-stall",
)
LONG_PAUSE_S, FULL_STEPS = 30.0, 20_000


class Bench:
    """All cases of one run of the benchmark, and how they are made."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.random = random.Random(args.seed)
        self.cases: list[Case] = []
        self.healthy: list[tuple[str, int, list[Any]]] = []
        self._jobs = 0

    def job(self, plan: str, **shape: Any) -> Job:
        """A new job in a folder of its own."""
        self._jobs += 1
        return Job(self.folder / f"job{self._jobs}", plan, **shape)

    def note(self, text: str) -> None:
        """Progress for whoever waits."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stderr.flush()

    def ranks(self, count: int, world: int = WORLD) -> list[int]:
        """`count` ranks in random order, none twice before all had their turn."""
        dealt: list[int] = []
        while len(dealt) < count:
            dealt += self.random.sample(range(world), world)
        return dealt[:count]

    # ------------------------------------------------------------------ drills that end

    def drill(self, job: Job, name: str, requests: Sequence[DrillRequest], *, factor: float = 0.0) -> None:
        """One case in a running job: inject, wait for the verdict, take it away, let the job settle."""
        case = Case(name, [answer_of(r) for r in requests], [], factor)
        seen = len(job.journal.records)
        for request in requests:
            case.began.append(self._begin(job, request))
        hang = any(request.fault in HANGS for request in requests)
        self._watch(job, case, seen, hang=hang)
        for request in requests:
            if request.fault != "kill":
                self._end(job, request)
        _settle(job, [answer for answer in case.answers if answer.fault != "kill"])
        case.verdicts = [verdict_of(r) for r in job.journal.records[seen:] if r["record"] in NAMES]
        case.steps = list(job.begins())
        self.keep(case)

    def keep(self, case: Case) -> None:
        """Take a case into the account and say how it went."""
        self.cases.append(case)
        for score, answer in zip(scores(case), case.answers, strict=True):
            when = "MISSED" if score.seconds is None else f"{score.seconds:.2f} s, {score.steps} steps"
            set_ = "exact" if score.exact else "set" if score.found else ""
            self.note(
                f"{case.name} {sorted(answer.exact)}: {when} {set_} {'' if score.layer is not False else 'layer?'}"
            )
        for verdict in wrong_alarms(case):
            self.note(f"  WRONG: {verdict}")

    def _begin(self, job: Job, request: DrillRequest) -> float:
        seen = len(job.journal.of("DrillRecord"))
        job.drill(request)
        job.until(lambda: len(job.journal.of("DrillRecord")) > seen, f"the drill {request}", limit_s=30.0)
        return float(job.journal.of("DrillRecord")[-1]["wall"])

    def _watch(self, job: Job, case: Case, seen: int, *, hang: bool) -> None:
        """Wait until all is found, but not for ever; then a little longer, for second thoughts and wrong alarms."""

        def done() -> bool:
            verdicts = [verdict_of(r) for r in job.journal.records[seen:] if r["record"] in NAMES]
            case.verdicts = verdicts
            return all(score.exact for score in scores(case))

        job.wait(done, HANG_WATCH_S if hang else SLOW_WATCH_S)
        job.wait(lambda: False, 1.0)

    def _end(self, job: Job, request: DrillRequest) -> None:
        seen = len(job.journal.of("DrillRecord"))
        if request.fault == "flip-bit":  # the same bit once more
            job.drill(request)
        else:
            link = {"source": request.source, "destination": request.destination, "node": request.node}
            job.drill(DrillRequest(request.fault, request.rank, stop=True, **link))
        job.until(lambda: len(job.journal.of("DrillRecord")) > seen, f"the end of {request}", limit_s=30.0)

    def many(self, requests: Sequence[tuple[str, list[DrillRequest], float]], **shape: Any) -> None:
        """Cases one after the other in one job; a job that dies is replaced by a new one."""
        waiting = list(requests)
        while waiting:
            before = len(waiting)
            self._some(self.job("healthy:10000000", **shape), waiting)
            if len(waiting) == before:
                raise Failed("a job died before its first drill")

    def _some(self, job: Job, waiting: list[tuple[str, list[DrillRequest], float]]) -> None:
        """As many of the cases that wait as the job outlives."""
        try:
            job.until(lambda: job.step > 60, "sixty steps")
            while waiting and job.alive():
                name, faults, factor = waiting.pop(0)
                self.drill(job, name, faults, factor=factor)
        except Failed as error:
            self.note(f"  a job was lost: {error}")
        finally:
            job.stop()

    # ------------------------------------------------------------------ drills that end a job

    def fatal(self, request: DrillRequest, *, limit_s: float = 30.0) -> None:
        """A case that the job does not outlive, or does not even begin with."""
        start = request.fault in ("never-start", "wrong-version")
        words = (*OBSERVE, "--drill", f"{request.fault}:{request.rank}") if start else OBSERVE
        job = self.job("healthy:10000000", words=words)
        case = Case(request.fault, [answer_of(request)], [])
        try:
            if not start:
                job.until(lambda: job.step > 30, "thirty steps")
                job.drill(request)
            job.wait(lambda: job.journal.of("DrillRecord"), limit_s)
            began = [float(record["wall"]) for record in job.journal.of("DrillRecord")[:1]]
            case.began = began or [time.time()]
            job.wait(lambda: _found(job, case), limit_s)
            job.wait(lambda: False, 2.0)
        except Failed as error:
            self.note(f"  a job was lost: {str(error).splitlines()[0]}")
            case.began = case.began or [time.time()]
        finally:
            job.stop()
        case.verdicts = [verdict_of(r) for r in job.journal.of("Finding")]
        if start:
            case.began = [_visible(job) or case.began[0]]
        self.keep(case)

    # ------------------------------------------------------------------ no fault at all

    def uneven(self, modes: Sequence[str], each: int, *, pause_s: float = 3.0) -> None:
        """Steps without any fault: `each` of every mode."""
        plan = ",".join(f"{mode}:{each}" for mode in modes)
        job = self.job(plan, words=OBSERVE, script=("--pause", str(pause_s)))
        try:
            job.until(lambda: job.step >= 0, "the first step")
            while job.alive() and not job.wait(lambda: False, 30.0):
                self.note(f"healthy and uneven: step {job.step} of {each * len(modes)}")
        except Failed as error:
            self.note(f"  a job was lost: {str(error).splitlines()[0]}")
        finally:
            job.stop()
        stretches = list(_stretches(job, each))
        self.healthy += stretches
        for mode, _, verdicts in stretches:
            for verdict in verdicts:
                self.note(f"  ALARM in {mode}: {verdict}")


def _stretches(job: Job, each: int) -> Iterator[tuple[str, int, list[Any]]]:
    """Mode, steps and false alarms of every stretch that a job came to. The start before the first belongs to it."""
    lines = [json.loads(line) for line in job.modes.read_text().splitlines()] if job.modes.exists() else []
    found = false_alarms([verdict_of(record) for record in job.journal.of("Finding")])
    ends = [line["wall"] for line in lines[1:]] + [float("inf")]
    first = 0.0
    for line, end in zip(lines, ends, strict=True):
        steps = min(each, max(job.step + 1 - line["step"], 0))
        yield (
            line["mode"],
            steps,
            [verdict for verdict in found if first <= verdict.wall < end and verdict.status == "new"],
        )
        first = end


def _found(job: Job, case: Case) -> bool:
    return any(right(verdict_of(record), case.answers[0]) for record in job.journal.of("Finding"))


def _visible(job: Job) -> float | None:
    """When the last member that came had said hello. One that says what is wrong is judged before its hello is kept."""
    walls = [r["wall"] for r in job.journal.of("FactRecord") if r["fact"]["kind"] == "Hello"]
    found = [r["wall"] for r in job.journal.of("Finding")]
    return min([max(walls), *found[:1]]) if walls else None


def _settle(job: Job, answers: Sequence[Answer]) -> None:
    """Wait until what was found has ended and the job has made some steps more."""

    def standing() -> set[int]:
        last = {record["number"]: record for record in job.journal.of("Finding")}
        kinds = {answer.kind for answer in answers}
        return {n for n, record in last.items() if record.get("status") != "ended" and record["kind"] in kinds}

    first = job.step
    job.wait(lambda: not standing() and job.step >= first + SETTLE_STEPS, ENDING_S)


# ---------------------------------------------------------------------- which cases


def link_of(bench: Bench) -> tuple[int, int]:
    """A directed link that the nested job uses."""
    source = bench.random.randrange(WORLD)
    return source, source ^ bench.random.choice(PEERS)


def lasting(bench: Bench, kind: str, count: int) -> list[tuple[str, list[DrillRequest], float]]:
    """Cases of one kind that a job outlives."""
    cases = []
    for rank in bench.ranks(count):
        source, destination = link_of(bench)
        if kind == "slow-compute":
            cases += [(f"{kind} x{f:g}", [DrillRequest(kind, rank, factor=f)], f) for f in FACTORS]
        elif kind == "slow-data":
            cases += [(f"{kind} x{f:g}", [DrillRequest(kind, rank, factor=f)], f) for f in (1.3, 2.0)]
        elif kind == "busy-gil":
            cases.append((f"{kind} x2", [DrillRequest(kind, rank, factor=2.0)], 2.0))
        elif kind == "throttle-link":
            link = {"source": source, "destination": destination}
            cases += [(f"{kind} x{f:g}", [DrillRequest(kind, factor=f, **link)], f) for f in (1.3, 2.0)]
        elif kind == "cut-link":
            cases.append((kind, [DrillRequest(kind, source=source, destination=destination)], 0.0))
        else:
            cases.append((kind, [DrillRequest(kind, rank)], 0.0))
    return cases


def pairs(bench: Bench, count: int) -> list[tuple[str, list[DrillRequest], float]]:
    """Two faults at once, on ranks that share no replica, stage and link."""
    cases = []
    for number in range(count):
        rank = bench.random.randrange(WORLD)
        other = rank ^ 7
        peer = other ^ bench.random.choice(PEERS)
        second = (
            DrillRequest("slow-data", other, factor=2.0),
            DrillRequest("throttle-link", source=other, destination=peer, factor=2.0),
            DrillRequest("slow-compute", other, factor=1.6),
        )[number % 3]
        cases.append(
            (f"two: slow-compute + {second.fault}", [DrillRequest("slow-compute", rank, factor=2.0), second], 2.0)
        )
    return cases


LASTING = ("slow-compute", "slow-data", "busy-gil", "throttle-link", "stop-data", "cut-link", "freeze", "flip-bit")
FATAL = ("mismatch", "never-start", "wrong-version")
ALL = (*LASTING, "two", "throttle-node", "kill", *FATAL, "real", "healthy")


def run(bench: Bench, kinds: Sequence[str], each: int, steps: int) -> None:
    """All cases of `kinds`, `each` times, and `steps` steps without a fault."""
    cases = [case for kind in LASTING if kind in kinds for case in lasting(bench, kind, each)]
    cases += pairs(bench, 2 * each) if "two" in kinds else []
    bench.random.shuffle(cases)
    bench.many(cases, words=OBSERVE)
    if "throttle-node" in kinds:
        nodes = [f"n{number % 4}" for number in bench.ranks(each)]
        node_cases = [("throttle-node", [DrillRequest("throttle-node", node=node, factor=2.0)], 2.0) for node in nodes]
        bench.many(node_cases, nodes=4, words=OBSERVE)
    if "kill" in kinds:
        kills = [("kill", [DrillRequest("kill", rank)], 0.0) for rank in bench.ranks(each)]
        bench.many(kills, words=("--standby", "2"))
    for kind in FATAL:
        for number, rank in enumerate(bench.ranks(each) if kind in kinds else ()):
            how = ("op", "shape", "extra")[number % 3] if kind == "mismatch" else ""
            bench.fatal(DrillRequest(kind, rank, how=how))
    if "real" in kinds:
        real = [
            (f"real slow-compute x{f:g}", [DrillRequest("slow-compute", rank, factor=f)], f)
            for rank in bench.ranks(each, 2)
            for f in (1.3, 2.0)
        ]
        bench.many(real, world=2, words=OBSERVE, script=("--real",))
    if "healthy" in kinds:
        bench.uneven(HEALTHY, -(-steps // len(HEALTHY)))
        if steps >= FULL_STEPS:
            bench.uneven(("save", "validate"), 120, pause_s=LONG_PAUSE_S)


# ---------------------------------------------------------------------- the account


def share(name: str, hits: int, count: int, target: float | None = None) -> Result:
    """A proportion with its Wilson interval."""
    value = hits / count if count else float("nan")
    return Result(f"{name} ({hits}/{count})", value, "", target, target is None or value >= target, wilson(hits, count))


def timing(name: str, values: Sequence[float], unit: str, limit: float) -> list[Result]:
    """Median with a bootstrap interval, the worst, and the share within the limit."""
    if not values:
        return []
    within = sum(value <= limit for value in values)
    worst, spread = max(values), (min(values), max(values))
    return [
        Result(f"{name}, median", statistics.median(values), unit, None, True, bootstrap(values)),
        Result(f"{name}, worst", worst, unit, limit, worst <= limit, spread),
        share(f"{name}, within {limit:g} {unit}", within, len(values)),
    ]


def strong(score: Score) -> bool:
    """Whether a fault is one that must be found: a hang, a death, a disagreement, or a slowness of 1.3 and up."""
    return not score.factor or score.factor >= 1.3


def results(bench: Bench) -> list[Result]:
    """Every figure of the benchmark."""
    every = [score for case in bench.cases for score in scores(case)]
    must = [score for score in every if strong(score)]
    steps = sum(count for _, count, _ in bench.healthy)
    false = sum(len(verdicts) for _, _, verdicts in bench.healthy)
    wrong = sum(len(wrong_alarms(case)) for case in bench.cases)
    good = sum(len(alarms(case.verdicts)) - len(wrong_alarms(case)) for case in bench.cases)
    found: list[Result] = []
    if every:
        found += [
            share("precision of findings", good, good + wrong + false, 0.95),
            share("recall, hangs and x1.3 and up", sum(s.found for s in must), len(must), 0.95),
            share("exact set", sum(s.exact for s in must), len(must), 0.9),
        ]
        layered = [score.layer for score in must if score.layer is not None]
        found.append(share("layer right", sum(layered), len(layered)))
    for factor in FACTORS:
        those = [s for s in every if s.fault == "slow-compute" and s.factor == factor and s.case.startswith("slow")]
        found += (
            [share(f"recall of slow compute at x{factor:g}", sum(s.found for s in those), len(those))] if those else []
        )
    for fault in sorted({score.fault for score in must}):
        those = [score for score in must if score.fault == fault]
        found.append(share(f"recall of {fault}", sum(s.found for s in those), len(those)))
    hangs = [s.seconds for s in must if s.fault in HANGS and s.seconds is not None]
    slow = [s.steps for s in must if s.factor and s.steps is not None]
    found += timing("hang: injection to verdict", hangs, "s", HANG_LIMIT_S)
    found += timing("slow: injection to verdict", slow, "steps", STEPS_LIMIT)
    two = [scores(case) for case in bench.cases if case.name.startswith("two")]
    found += (
        [share("two faults, both named", sum(all(s.found for s in one) for one in two), len(two), 0.9)] if two else []
    )
    if steps:
        low, high = poisson(false, steps / 1e4)
        found.append(Result("false alarms per 10,000 steps", false * 1e4 / steps, "", 0.0, false == 0, (low, high)))
        found.append(
            Result("healthy and uneven steps", steps, "steps", FULL_STEPS, steps >= FULL_STEPS, (steps, steps))
        )
    return found


def main() -> int:
    """Run it and print the account."""
    parser = options(__doc__ or "")
    parser.add_argument("--kinds", default=",".join(ALL), help="which drills, separated by commas")
    parser.add_argument("--each", type=int, default=5, help="cases of each kind and factor")
    parser.add_argument("--steps", type=int, default=FULL_STEPS, help="steps without a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the run directories here")
    parser.add_argument("--cases", type=Path, help="write every case here, as JSON")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(ALL):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.folder or Path(folder), args)
        quick(bench) if args.quick else run(bench, kinds, args.each, args.steps)
    report("diagnosis", results(bench), args.format)
    if args.cases:
        args.cases.write_text(json.dumps([[asdict(score) for score in scores(case)] for case in bench.cases]))
    return 0


def quick(bench: Bench) -> None:
    """One short job: a slow rank, a slow link, a stopped loader."""
    link = DrillRequest("throttle-link", source=5, destination=7, factor=2.0)
    cases = [("slow-compute x2", [DrillRequest("slow-compute", 2, factor=2.0)], 2.0)]
    cases += [("throttle-link x2", [link], 2.0), ("stop-data", [DrillRequest("stop-data", 4)], 0.0)]
    bench.many(cases, words=OBSERVE)


if __name__ == "__main__":
    sys.exit(main())
