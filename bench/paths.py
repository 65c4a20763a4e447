"""Planned paths against chance on a real fabric of network namespaces: what groups that reduce at once get of it.

Eight members of keepstep's own transport below two leaves with four spines. In every round the connections take
random source ports, as they would without a plan, and then the planned ones; the rates are those of the same
members right after each other. Then a spine goes down while they reduce. With `--steps` the GPT example trains across
the fabric, with and without a plan. Needs root.
"""

from __future__ import annotations

import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from fabric_lab import Fabric, FabricPlan, why_no_fabric
from harness import Result, judge, options, report
from watched_jobs import Failed, normal_step_s, read

from keepstep.records.path_messages import Carried
from keepstep.records.topology import ClosShape
from keepstep.traffic.clos import clos
from keepstep.traffic.conducting import TrafficConductor
from keepstep.traffic.fairness import max_min
from keepstep.traffic.path_actions import AskCounts, AskHops, ConductorSettings, GivePaths, Place, Seen, Tell
from keepstep.traffic.planner import Planner

RANKS, SPINES, LEAF = 8, 4, 4
HOST_MBIT = 50
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame of 1500 bytes with IPv4 and TCP with time stamps, as the token buckets count it."""
JOBS = Path(__file__).parent / "jobs"
GROUPS = {
    4: [(f"a{n}", (n, n + LEAF)) for n in range(LEAF)],
    8: [(f"a{n}", (n, n + LEAF)) for n in range(LEAF)] + [(f"b{n}", (n, LEAF + (n + 1) % LEAF)) for n in range(LEAF)],
}


class Members:
    """The member processes, one on each host of the fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self.answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.number = 0
        self.processes = []
        command = [sys.executable, str(JOBS / "flow_member.py")]
        for host in fabric.hosts:
            self.processes.append(
                fabric.start(
                    host.namespace,
                    [*command, str(host.number), host.address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        roster = [json.loads(process.stdout.readline()) for process in self.processes]
        self.places = {rank: Place(f"h{rank}", entry[3], entry[4]) for rank, entry in enumerate(roster)}
        for rank, process in enumerate(self.processes):
            self.tell(rank, roster)
            threading.Thread(target=self._read, args=(rank, process.stdout), daemon=True).start()

    def _read(self, rank: int, lines: Any) -> None:
        for line in lines:
            self.answers.put((rank, json.loads(line)))

    def tell(self, rank: int, order: Any) -> None:
        self.processes[rank].stdin.write(json.dumps(order) + "\n")
        self.processes[rank].stdin.flush()

    def collect(self, what: str, count: int) -> list[dict[str, Any]]:
        """`count` answers to `what`, from any members."""
        found = []
        while len(found) < count:
            _, answer = self.answers.get(timeout=180)
            if answer["do"] == what:
                found.append(answer)
        return found

    def take(self, plans: dict[int, tuple[dict[int, Any], dict[int, Any]]]) -> None:
        """Has all members prepare ports; they change over at the end of their next step."""
        self.number += 1
        for rank in range(RANKS):
            dial, accept = plans.get(rank, ({}, {}))
            self.tell(rank, {"do": "paths", "number": self.number, "dial": dial, "accept": accept})
        for answer in self.collect("paths", RANKS):
            assert answer["why"] == "", answer

    def reduce(self, groups: int, nbytes: int, times: int) -> dict[str, list[float]]:
        """Seconds of each reduction by group, as its slower member saw it."""
        self.start(groups, nbytes, times)
        return self.finish()

    def start(self, groups: int, nbytes: int, times: int) -> None:
        for rank in range(RANKS):
            self.tell(rank, {"do": "reduce", "groups": GROUPS[groups], "nbytes": nbytes, "times": times})

    def finish(self) -> dict[str, list[float]]:
        return {name: [taken for _, taken in rows] for name, rows in self.finish_timed().items()}

    def finish_timed(self) -> dict[str, list[tuple[float, float]]]:
        """(begin, seconds) of each reduction by group."""
        both: dict[str, list[list[tuple[float, float]]]] = {}
        for answer in self.collect("reduce", RANKS):
            by_group: dict[str, list[tuple[float, float]]] = {}
            for name, begin, taken, done in answer["took"]:
                assert done
                by_group.setdefault(name, []).append((begin, taken))
            for name, rows in by_group.items():
                both.setdefault(name, []).append(rows)
        return {
            name: [max(pair, key=lambda row: row[1]) for pair in zip(*rows, strict=True)] for name, rows in both.items()
        }


class Site:
    """The conductor of the benchmark: the members' traffic, the fabric's topology, and plans made real."""

    def __init__(self, fabric: Fabric, members: Members, groups: int, nbytes: int) -> None:
        self.names = {
            fabric.spine_address(spine, leaf=leaf): f"spine{spine}" for spine in range(SPINES) for leaf in range(2)
        }
        settings = ConductorSettings(hops=self.names, ports=tuple(range(42000, 42128)))
        self.planner = Planner(clos(ClosShape(hosts=RANKS, hosts_per_leaf=LEAF, spines=SPINES)))
        self.conductor = TrafficConductor("bench", self.planner, settings=settings)
        self.conductor.members(1, members.places)
        self.members = members
        pairs = [ranks for _, ranks in GROUPS[groups]]
        self.pairs = [*pairs, *((b, a) for a, b in pairs)]
        self.seen = [Seen(rank, -1, 3) for rank in range(RANKS)] + [Seen(a, b, 3, 3.0 * nbytes) for a, b in self.pairs]
        self.given: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        self.told: list[Tell] = []

    def turn(self) -> None:
        """One look of the conductor, and what it wants done."""
        self.conductor.seen(self.seen, generation=1)
        plans: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        asked = []
        counted = []
        for action in self.conductor.step(time.time()):
            if isinstance(action, AskHops):
                asked.append(action)
            elif isinstance(action, AskCounts):
                counted.append(action)
            elif isinstance(action, GivePaths):
                plans[action.rank] = (action.dial, action.accept)
            elif isinstance(action, Tell):
                self.told.append(action)
        for action in asked:
            rank = int(action.node[1:])
            self.members.tell(
                rank,
                {
                    "do": "hops",
                    "number": action.number,
                    "ways": [list(w) for w in map(msgspec.structs.astuple, action.ways)],
                    "ttls": action.ttls,
                },
            )
        for answer in self.members.collect("hops", len(asked)):
            self.conductor.hops(answer["number"], answer["hops"])
        for action in counted:
            ways = [list(w) for w in map(msgspec.structs.astuple, action.ways)]
            self.members.tell(int(action.node[1:]), {"do": "counts", "number": action.number, "ways": ways})
        for answer in self.members.collect("counts", len(counted)):
            self.conductor.counted(answer["number"], [Carried(*one) for one in answer["carried"]])
        if plans:
            self.given = plans
            self.members.take(plans)
            for rank in range(RANKS):
                self.conductor.ready(rank, self.conductor.number, installed=True)

    def settle(self) -> None:
        """Until a plan is given out."""
        for _ in range(100):
            self.turn()
            if self.given:
                return
            time.sleep(0.05)
        raise RuntimeError(f"no plan: {[tell.text for tell in self.told]}")

    def probed(self, ports: dict[tuple[int, int], int]) -> dict[tuple[int, int], tuple[str, ...]]:
        """The ways that connections from `ports` take, in both directions, as the switches say."""
        places, asked = self.members.places, []
        for (a, b), port in ports.items():
            here, there = places[a], places[b]
            asked.append((a, b, [here.host, port, there.host, there.port]))
            asked.append((b, a, [there.host, there.port, here.host, port]))
        for number, (rank, _, way) in enumerate(asked):
            self.members.tell(rank, {"do": "hops", "number": number, "ways": [way], "ttls": [2]})
        hops = {answer["number"]: answer["hops"][0][0] for answer in self.members.collect("hops", len(asked))}
        return {
            (a, b): (f"leaf{a // LEAF}", self.names[hops[number]], f"leaf{b // LEAF}")
            for number, (a, b, _) in enumerate(asked)
        }

    def modelled(self, routes: dict[tuple[int, int], tuple[str, ...]], uplink_mbit: float) -> list[float]:
        """Mbit/s of payload that each flow gets by the model, on these routes."""
        index: dict[str, int] = {}
        capacity: list[float] = []

        def link(name: str, mbit: float) -> int:
            if name not in index:
                index[name] = len(capacity)
                capacity.append(mbit * PAYLOAD)
            return index[name]

        uses = []
        for a, b in self.pairs:
            path = routes[a, b]
            hops = [link(f"{x}>{y}", uplink_mbit) for x, y in zip(path, path[1:], strict=False)]
            uses.append([link(f"h{a}>", HOST_MBIT), *hops, link(f">h{b}", HOST_MBIT)])
        return [float(value) for value in max_min(uses, capacity)]


def chance(members: Members, groups: int, rng: random.Random) -> dict[tuple[int, int], int]:
    """A random source port for every connection, as a kernel would choose them; the ports by (dialer, acceptor)."""
    plans: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {rank: ({}, {}) for rank in range(RANKS)}
    chosen: dict[tuple[int, int], int] = {}
    for _, (a, b) in GROUPS[groups]:
        chosen[a, b] = rng.randrange(44000, 60000)
        plans[a][0][b] = plans[b][1][a] = [chosen[a, b]]
    members.take(plans)
    return chosen


def rates(took: dict[str, list[float]], nbytes: int) -> tuple[float, float]:
    """Mbit/s of payload over all groups and both directions (a reduction of two sends `nbytes` each way): until the
    last group is done, as a training step sees it, and summed over what each group gets by itself."""
    bits = 2 * nbytes * 8e-6
    steps = [max(step) for step in zip(*took.values(), strict=True)]
    return len(took) * bits / statistics.median(steps), sum(bits / statistics.median(t) for t in took.values())


def compare(
    fabric: Fabric, members: Members, *, groups: int, uplink_mbit: int, trials: int, megabytes: int
) -> Iterator[Result]:
    """Random ports against planned ones, trial by trial. Reductions of `megabytes` where links are not shared: long
    against what a reduction costs once (threads that start, windows that open, the wait for the last)."""
    name = f"{groups} groups, {HOST_MBIT // uplink_mbit}:1"
    nbytes = megabytes * 1_000_000 * uplink_mbit // HOST_MBIT
    rng = random.Random(groups * 1000 + uplink_mbit)
    members.reduce(groups, 4096, 2)
    site = Site(fabric, members, groups, nbytes)
    site.settle()
    planned: list[tuple[float, float]] = []
    hashed: list[tuple[float, float]] = []
    likeness: list[float] = []
    for _ in range(trials):
        ports = chance(members, groups, rng)
        members.reduce(groups, 4096, 1)
        hashed.append(rates(members.reduce(groups, nbytes, 3), nbytes))
        expected = min(site.modelled(site.probed(ports), uplink_mbit)) * 2 * groups
        likeness.append(hashed[-1][0] / expected)
        members.take(site.given)
        members.reduce(groups, 4096, 1)
        planned.append(rates(members.reduce(groups, nbytes, 3), nbytes))
    best = min(site.modelled(site.conductor.routes, uplink_mbit)) * 2 * groups
    aim = 1.5 if uplink_mbit == HOST_MBIT else None
    for number, what in enumerate(("until all are done", "sum of groups")):
        chances, plans = [one[number] for one in hashed], [one[number] for one in planned]
        usual = statistics.median(chances)
        yield judge(f"{name}: random ports, {what} (measured)", chances, unit="Mbit/s")
        yield judge(f"{name}: planned, {what} (measured)", plans, unit="Mbit/s")
        yield judge(
            f"{name}: planned / median of random, {what}",
            [value / usual for value in plans],
            unit="x",
            at_least=None if number else aim,
        )
    yield judge(f"{name}: random ports, measured / model on their ways", likeness, unit="x")
    shares = [step / best for step, _ in planned]
    yield judge(f"{name}: planned / model's optimum", shares, unit="share", at_least=0.95)


def spine_lost(fabric: Fabric, members: Members) -> Iterator[Result]:
    """A spine goes down while four groups reduce on planned paths."""
    yield from _in_mid_run(
        "spine lost", members, site_of(fabric, members), steps=110, harm=lambda: fabric.fail_spine(1)
    )
    fabric.restore_spine(1)


def uplink_slowed(fabric: Fabric, members: Members) -> Iterator[Result]:
    """A leaf's link to one spine falls to a tenth of its rate while four groups reduce on planned paths."""
    slow = HOST_MBIT // 10
    yield from _in_mid_run(
        "uplink slowed to a tenth",
        members,
        site_of(fabric, members),
        steps=110,
        harm=lambda: fabric.slow_uplink(0, 1, mbit=slow),
    )
    fabric.slow_uplink(0, 1, mbit=HOST_MBIT)


_SMALL = 250_000


def site_of(fabric: Fabric, members: Members) -> Site:
    """Four groups on planned paths that have sent something."""
    members.reduce(4, 4096, 2)
    site = Site(fabric, members, 4, _SMALL)
    site.settle()
    members.reduce(4, 4096, 1)
    return site


def _in_mid_run(name: str, members: Members, site: Site, *, steps: int, harm: Callable[[], object]) -> Iterator[Result]:
    """What is left of the fabric's capacity after `harm`, and when the groups get it."""
    members.start(4, _SMALL, steps)
    told = len(site.told)
    lost = time.time() + 2.0
    failed = False
    while time.time() < lost + 4.0:
        if not failed and time.time() >= lost:
            harm()
            lost, failed = time.time(), True
        site.turn()
        time.sleep(0.1)
    rows = members.finish_timed()
    rates_now = site.modelled(site.conductor.routes, HOST_MBIT)
    steps_after = [step for step in zip(*rows.values(), strict=True) if min(begin for begin, _ in step) > lost]
    for what, left, got in (
        ("sum of groups", sum(rates_now), _sum_of_groups),
        ("until all are done", len(rates_now) * min(rates_now), _until_all_are_done),
    ):
        after = [(max(begin + taken for begin, taken in step), got(step)) for step in steps_after]
        usual = [statistics.median(mbit for _, mbit in after[at : at + 5]) for at in range(len(after))]
        good = [end - lost for (end, _), median in zip(after, usual, strict=True) if median >= 0.9 * left]
        yield judge(f"{name}, {what}: remaining capacity (model)", [left], unit="Mbit/s")
        yield judge(f"{name}, {what}: time to 90 % of it", good[:1] or [float("inf")], unit="s", at_most=3.0)
        late = [mbit / left for end, mbit in after if end > lost + 3.0]
        yield judge(f"{name}, {what}: share of it from 3 s on", late or [0.0], unit="share", at_least=0.9)
    moved = [tell.moved for tell in site.told[told:] if tell.down]
    yield judge(f"{name}: flows moved", [float(sum(moved[:1]))], unit="of 8", at_most=2.0)


_Step = Sequence[tuple[float, float]]
"""(begin, seconds) of the reduction of every group."""


def _sum_of_groups(step: _Step) -> float:
    """Mbit/s of payload, each group by itself."""
    return sum(2 * _SMALL * 8e-6 / taken for _, taken in step)


def _until_all_are_done(step: _Step) -> float:
    """Mbit/s of payload, as a training step sees it that waits for all."""
    return len(step) * 2 * _SMALL * 8e-6 / max(taken for _, taken in step)


@contextmanager
def built(uplink_mbit: int) -> Iterator[Fabric]:
    """A fabric and nothing left of it."""
    with Fabric(FabricPlan(hosts=RANKS, spines=SPINES, host_mbit=HOST_MBIT, uplink_mbit=uplink_mbit)) as fabric:
        yield fabric


def training_step(stage: str, steps: int) -> float:
    """Median seconds of a step of the GPT example over the fabric, rank after rank below the other leaf.

    Raises Failed.
    """
    with tempfile.TemporaryDirectory() as scratch, built(HOST_MBIT) as fabric:
        return _train(Path(scratch), fabric, stage=stage, steps=steps)


def _train(scratch: Path, fabric: Fabric, *, stage: str, steps: int) -> float:
    (scratch / "topology.yaml").write_text("keepstep_topology: 1\nclos: {hosts: 8, hosts_per_leaf: 4, spines: 4}\n")
    hops = "".join(f'"{fabric.spine_address(s, leaf=leaf)}" = "spine{s}"\n' for s in range(SPINES) for leaf in range(2))
    (scratch / "traffic.toml").write_text(f'topology = "topology.yaml"\nstage = "low_priority"\n[hops]\n{hops}')
    keepstep = [sys.executable, "-m", "keepstep.cli"]
    script = [str(JOBS.parent.parent / "examples/gpt/train.py"), "--steps", str(steps)]
    script += ["--step-log", str(scratch / "steps")]
    place = ["--host", fabric.management, "--port", "29400", "--run", str(scratch / "run")]
    wanted = ["--traffic", str(scratch / "traffic.toml")] if stage == "act" else []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (scratch / "said").open("wb") as said:
        controller = fabric.start(
            fabric.manage,
            [*keepstep, "controller", "--nnodes", "8", *place, *wanted, *script],
            stdout=said,
            stderr=said,
        )
    token = scratch / "run" / "token"
    while not token.exists() and controller.poll() is None:
        time.sleep(0.1)
    time.sleep(1.0)
    for number in [n for pair in zip(range(LEAF), range(LEAF, RANKS), strict=True) for n in pair]:
        host = fabric.hosts[number]
        names = ["--node", f"h{number}", "--address", host.address, "--run", str(scratch / f"agent{number}")]
        reach = ["--controller", f"{fabric.management}:29400", "--token-file", str(token)]
        fabric.start(host.namespace, [*keepstep, "agent", *reach, *names], **quiet)
        time.sleep(0.2)
    with suppress(subprocess.TimeoutExpired):
        controller.wait(timeout=420)
    if controller.returncode != 0:
        text = (scratch / "said").read_text(errors="replace")[-1500:]
        raise Failed(f"the training job ended with {controller.returncode}\n{text}")
    return normal_step_s(read(scratch / "steps"))


def trained(steps: int) -> list[Result]:
    """The GPT example without and with a plan, in turns. Raises Failed."""
    took: dict[str, list[float]] = {"off": [], "act": []}
    for _ in range(2):
        for stage, seconds in took.items():
            seconds.append(training_step(stage, steps))
    return [
        judge("GPT example, step without a plan (measured)", took["off"], unit="s"),
        judge("GPT example, step on planned paths (measured)", took["act"], unit="s"),
    ]


def compared(uplink_mbit: int, *, quick: bool) -> Iterator[Result]:
    """Random ports against planned ones on a fabric with such uplinks."""
    with built(uplink_mbit) as fabric:
        members = Members(fabric)
        trials, size = (3, 2) if quick else (10, 8)
        for groups in (4,) if quick else (4, 8):
            yield from compare(fabric, members, groups=groups, uplink_mbit=uplink_mbit, trials=trials, megabytes=size)


def harmed() -> Iterator[Result]:
    """A spine that goes down and an uplink that slows down while groups reduce."""
    with built(HOST_MBIT) as fabric:
        members = Members(fabric)
        yield from spine_lost(fabric, members)
        yield from uplink_slowed(fabric, members)


def main() -> int:
    """Runs everything; 1 if a target was missed."""
    parser = options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("flows", "faults", "training"), default="", help="leave the rest out")
    parser.add_argument("--steps", type=int, default=0, help="train the GPT example for so many steps, both ways")
    chosen = parser.parse_args()
    why = why_no_fabric()
    if why:
        print(f"paths: not run: {why}")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[Result] = []
    if chosen.only in ("", "flows"):
        for uplink_mbit in [HOST_MBIT] if chosen.quick else [HOST_MBIT, HOST_MBIT // 2]:
            results += compared(uplink_mbit, quick=chosen.quick)
    if chosen.only in ("", "flows", "faults"):
        results += harmed()
    try:
        results += trained(chosen.steps) if chosen.steps and chosen.only in ("", "training") else []
    except Failed as failure:
        sys.stderr.write(f"bench/paths.py: {failure}\n")
        results.append(judge("GPT example", [0.0], unit="steps", at_least=float(chosen.steps)))
    report("paths", results, chosen.format)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
