"""How the live analysis grows: 1,024, 4,096 and 16,384 ranks, 64 collectives a rank and step, one step a second.

The records are modelled (a seeded job in four kinds of nested groups, as its agents would summarise it); the time and
the memory of the analysis are measured, from the bytes that arrive to the findings. Making the records is not analysis
and is shown apart, and so is what one agent spends on summarising one rank's ring, slot by slot. Faults of every class
are planted; each has to be named, alone, or the result is missed.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from harness import Result, judge, options, report

from keepstep.diagnosis.live import LiveFinding, WatchPlan, begin_watch, observe
from keepstep.diagnosis.live_state import Watch
from keepstep.diagnosis.summarise import Summariser
from keepstep.records.finding import Suspect
from keepstep.records.summary import HostSample, WatchReport
from keepstep.simulation.simulated_layout import Layout
from keepstep.simulation.simulated_records import Disturbance, JobModel
from keepstep.simulation.simulated_rings import MemberRing
from keepstep.simulation.simulated_stall import Stall, stall_reports

BEGIN = 14
AT_MOST_STEP_S = 1.0
AT_MOST_MEMORY_GB = 4.0
STALL_TICKS = 8

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(WatchReport)


@dataclass
class Measured:
    """One world size: seconds of analysis for each step, and of each look at the stall; bytes; what was said."""

    world: int
    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    making_s: float = 0.0
    records: int = 0
    sent: int = 0
    said: list[LiveFinding] = field(default_factory=list)


def planted(layout: Layout) -> tuple[tuple[Disturbance, ...], Stall, set[tuple[str, Suspect]]]:
    """The faults of a run, the hang at its end, and the right answers."""
    world = layout.world
    slow, data, source, hung = (world * part // 16 + 3 for part in (3, 7, 11, 13))
    target = int(layout.neighbours("tp")[source, 0])
    faults = (
        Disturbance("slow-compute", begin=BEGIN, rank=slow),
        Disturbance("slow-data", begin=BEGIN, rank=data),
        Disturbance("throttle-link", begin=BEGIN, rank=source, peer=target),
    )
    answers = {
        ("compute_slow", Suspect(rank=slow)),
        ("compute_slow", Suspect(rank=data)),
        ("communication_slow", Suspect(link=(source, target))),
        ("noncommunication_hang", Suspect(rank=hung)),
    }
    return faults, Stall("freeze", 0, hung), answers


def encoded(reports: Sequence[WatchReport]) -> list[bytes]:
    """What the agents send."""
    return [_encoder.encode(one) for one in reports]


def analysed(found: Measured, state: Watch, data: Sequence[bytes], *, now: float) -> tuple[Watch, float]:
    """(state, seconds) of one look at what arrived; what it says goes into `found`."""
    began, used = time.perf_counter(), time.process_time()
    state, changes = observe(state, [_decoder.decode(one) for one in data], now=now)
    found.said += changes
    found.cpu_s.append(time.process_time() - used)
    return state, time.perf_counter() - began


def run(replicas: int, steps: int) -> tuple[Measured, set[tuple[str, Suspect]]]:
    """One world of 64 x `replicas` ranks."""
    layout = Layout(tp=8, pp=8, dp=replicas, ep=8)
    faults, stall, answers = planted(layout)
    model = JobModel(layout, seed=replicas, disturbances=faults)
    state, found = begin_watch(WatchPlan(world=layout.world)), Measured(layout.world)
    for step in range(steps):
        began = time.perf_counter()
        data = encoded(model.report(step, profiles=step == 0))
        found.making_s += time.perf_counter() - began
        found.sent += sum(map(len, data)) if step else 0
        state, spent = analysed(found, state, data, now=model.clock_ns / 1e9)
        found.step_s.append(spent)
        progress(f"{layout.world} ranks: step {step + 1} of {steps}")
    since = model.clock_ns
    for tick in range(1, STALL_TICKS):
        now_ns = since + tick * 500_000_000
        began = time.perf_counter()
        data = encoded(stall_reports(layout, Stall(stall.kind, steps, stall.rank), since_ns=since, now_ns=now_ns))
        found.making_s += time.perf_counter() - began
        state, spent = analysed(found, state, data, now=now_ns / 1e9)
        found.stall_s.append(spent)
        progress(f"{layout.world} ranks: {tick / 2:.1f} s of standstill")
    found.records = layout.world * steps * 64 * 3
    return found, answers


def agents_cost(steps: int) -> list[float]:
    """Seconds of an agent for one rank and step: its ring read slot by slot."""
    model = JobModel(Layout(tp=8, pp=8, dp=2, ep=2), seed=1)
    ring, summariser, spent = MemberRing(model, 7), Summariser(), []
    for step in range(steps):
        ring.write(step, model.times(step))
        began = time.perf_counter()
        window = summariser.drain(ring.memory, HostSample(), now_ns=ring.now_ns).window
        spent.append(time.perf_counter() - began)
        assert window is not None
    return spent


def progress(text: str) -> None:
    sys.stderr.write(f"\r{text}    ")
    sys.stderr.flush()


def named(found: Measured) -> set[tuple[str, Suspect]]:
    """The alarms: kind, and the only suspect of each set."""
    alarms = [one.finding for one in found.said if one.status == "new" and one.finding.kind not in ("imbalance",)]
    return {(one.kind, group[0]) for one in alarms for group in one.suspects if len(group) == 1}


def results(found: Measured, answers: set[tuple[str, Suspect]]) -> list[Result]:
    """The lines of one world size."""
    size, worst = f"{found.world} ranks", max(found.step_s)
    said = named(found)
    steps = len(found.step_s)
    return [
        judge(f"{size}: analysis of a step (measured)", found.step_s, unit="s", at_most=AT_MOST_STEP_S),
        judge(f"{size}: all steps, a step (measured)", [sum(found.step_s) / steps], unit="s", at_most=AT_MOST_STEP_S),
        judge(f"{size}: slowest step (measured)", [worst], unit="s"),
        judge(f"{size}: CPU of a step (measured)", found.cpu_s[:steps], unit="s", at_most=AT_MOST_STEP_S),
        judge(f"{size}: look at a standstill (measured)", found.stall_s, unit="s"),
        judge(f"{size}: CPU of a look at a standstill (measured)", found.cpu_s[steps:], unit="s"),
        judge(f"{size}: planted faults named", [len(said & answers) / len(answers)], unit="share", at_least=1.0),
        judge(f"{size}: wrong alarms", [float(len(said - answers))], unit="", at_most=0.0),
        judge(f"{size}: from a rank (modelled)", [found.sent / found.world / (steps - 1)], unit="B/s", at_most=1000.0),
        judge(f"{size}: slot records behind it (modelled)", [float(found.records)], unit=""),
        judge(f"{size}: making the records", [found.making_s], unit="s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser: argparse.ArgumentParser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=0, help="steps of each world (default 40, quick 24)")
    args = parser.parse_args(argv)
    steps = args.steps or (24 if args.quick else 40)
    lines, medians = [], {}
    for replicas in (16, 64) if args.quick else (16, 64, 256):
        found, answers = run(replicas, steps)
        lines += results(found, answers)
        medians[found.world] = sorted(found.cpu_s[:steps])[steps // 2]
    small, large = min(medians), max(medians)
    growth = math.log(medians[large] / medians[small]) / math.log(large / small)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines += [
        judge(f"growth from {small} to {large} ranks, CPU: exponent (measured)", [growth], unit="", at_most=1.2),
        judge("memory, records included (measured)", [memory], unit="GB", at_most=AT_MOST_MEMORY_GB),
        judge("an agent, one rank and step (measured)", agents_cost(40), unit="s"),
    ]
    sys.stderr.write("\r")
    report("analysis_scale", lines, args.format)
    return 0


if __name__ == "__main__":
    sys.exit(main())
