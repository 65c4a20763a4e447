"""How long planning takes at 1,024, 4,096 and 16,384 hosts with 8 rails, and whether the plan meets its bound.

Jobs of 16 to 512 hosts sit on hosts drawn at random (the worst case: nearly every ring edge leaves its leaf), 8 ranks
a host, one all-reduce over all ranks: one flow a host and rail. Leaves have 128 hosts and 128 uplinks (1:1). Judged is
the processor time of the planner, which runs in one thread: the time it takes where it has a core to itself, however
busy this machine is. Measured; the figures of C4P at the end are modelled.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness import Result, judge, options, report

from keepstep.records.demand import DeclaredCollective, Flow, JobLayout
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.declared import demand_of
from keepstep.traffic.flows import flows_of
from keepstep.traffic.planner import Change, Planner
from keepstep.traffic.published import c4p_figures

SIZES = (1024, 4096, 16384)
SPARE = 64
PLAN_S, CHANGE_S = 10.0, 0.2
GIGA = 1e9


@dataclass
class Times:
    """Seconds of one round; `excess` is max load / bound after every change."""

    plan: float
    plan_wall: float
    arrive: list[float]
    fail: list[float]
    restore: list[float]
    leave: list[float]
    moved: list[float]
    excess: list[float]


def timed(work: Callable[[], Change]) -> tuple[float, Change]:
    begin = time.process_time()
    change = work()
    return time.process_time() - begin, change


def jobs_on(names: list[str], rng: random.Random) -> list[list[str]]:
    """Cut shuffled hosts into jobs."""
    found = []
    while names:
        size = rng.choice((16, 32, 64, 128, 256, 512))
        found.append(names[:size])
        names = names[size:]
    return found


def flows_on(planner: Planner, job: str, hosts: list[str]) -> list[Flow]:
    layout = JobLayout(job, tuple(hosts), (DeclaredCollective("world", "all_reduce", GIGA),))
    return flows_of(demand_of(layout), planner.network)


def one_round(hosts: int, seed: int) -> Times:
    """A full plan, then arrivals and departures of one job and failures of one link, five of each."""
    rng = random.Random(seed)
    shape = ClosShape(
        hosts=hosts, hosts_per_leaf=128, spines=128, rails=8, port_gbps=400.0, uplink_gbps=400.0, separate_rails=True
    )
    planner = Planner(clos(shape))
    names = list(planner.network.topology.hosts)
    rng.shuffle(names)
    spare, busy = names[:SPARE], names[SPARE:]
    wanted = {f"job{n}": flows_on(planner, f"job{n}", members) for n, members in enumerate(jobs_on(busy, rng))}
    begin, wall = time.process_time(), time.perf_counter()
    for job, flows in wanted.items():
        last = planner.arrive(job, flows)
    times = Times(
        time.process_time() - begin, time.perf_counter() - wall, [], [], [], [], [], [last.max_load / last.bound]
    )
    newcomer = flows_on(planner, "newcomer", spare)
    for number in range(5):
        seconds, change = timed(lambda: planner.arrive("newcomer", newcomer))
        times.arrive.append(seconds)
        times.moved.append(change.moved)
        leaf, spine = f"leaf{number}r{number}", f"spine{rng.randrange(128)}r{number}"
        for place, down in ((times.fail, [f"{leaf}>{spine}", f"{spine}>{leaf}"]), (times.restore, [])):
            seconds, changed = timed(lambda down=down: planner.set_down(down))
            place.append(seconds)
            times.excess.append(changed.max_load / changed.bound)
        times.excess.append(change.max_load / change.bound)
        seconds, _ = timed(lambda: planner.leave("newcomer"))
        times.leave.append(seconds)
    return times


def results_of(hosts: int, rounds: list[Times]) -> list[Result]:
    def every(name: str) -> list[float]:
        return [value for one in rounds for value in getattr(one, name)]

    title = f"{hosts} hosts x 8 rails"
    return [
        judge(f"{title}: full plan", [one.plan for one in rounds], unit="s", at_most=PLAN_S),
        judge(f"{title}: full plan, wall clock at this load", [one.plan_wall for one in rounds], unit="s"),
        judge(f"{title}: one job of 64 hosts arrives", every("arrive"), unit="s", at_most=CHANGE_S),
        judge(f"{title}: one link fails", every("fail"), unit="s", at_most=CHANGE_S),
        judge(f"{title}: the link is back", every("restore"), unit="s"),
        judge(f"{title}: the job leaves", every("leave"), unit="s"),
        judge(f"{title}: other flows moved by the arrival", every("moved"), unit="flows"),
        judge(f"{title}: max load / bound, worst", [max(every("excess"))], unit="x", at_most=1.0),
    ]


def published() -> list[Result]:
    """The figures of C4P by the model, in Gbit/s; (lowest, highest) over jobs and seeds of the hash."""
    return [
        Result(f"modelled, C4P: {one.name} (published: {one.published})", one.modelled[1], "Gb/s", None, True,
               (one.modelled[0], one.modelled[2]))
        for one in c4p_figures(range(20))
    ]  # fmt: skip


def main() -> int:
    """Runs all sizes and prints the results; 1 if a target was missed."""
    chosen = options(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    results: list[Result] = []
    for hosts in SIZES:
        results += results_of(hosts, [one_round(hosts, seed) for seed in range(1 if chosen.quick else 3)])
        print(f"{hosts} hosts done", file=sys.stderr)
    results += published()
    report("planner_scale", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
