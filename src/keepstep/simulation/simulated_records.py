"""A training job as its agents would summarise it, with faults at known places. Seeded; vectorised over the ranks.

The model is bulk-synchronous: a step lasts as long as its slowest rank computes and waits for data, plus the
collectives; everybody else waits in them. It makes the waits that the ring of oracles, section 7, shows, and no more:
it is for measuring the analysis and for testing that each class of fault is told from the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from keepstep.records.summary import GroupEntry, MemberProfile, MemberSummary, WatchReport
from keepstep.records.summary_rows import GROUP_ROW, PEER_ROW, STEP_ROW
from keepstep.simulation.simulated_layout import Layout, Numbers

__all__ = ["CALLS", "Disturbance", "JobModel", "StepTimes"]

CALLS = 16
"""Collectives of each kind of group in one step."""

_US = 1e6
_OPS = {"tp": 1, "pp": 10, "dp": 5, "ep": 6}


@dataclass(frozen=True)
class Disturbance:
    """Something that goes on from step `begin` up to, but not with, `end`.

    `kind`: slow-compute, busy-gil, starved, slow-data (`rank`, `factor` of a step); throttle-link (`rank` to `peer`),
    throttle-source (`rank`), throttle-node (`node`) make collectives `factor` - 1 steps longer; data-stall (all ranks);
    sequence-lengths (of each replica), heavy-last-stage, garbage-collection, rotating (no rank), saving, recompiling
    (`rank`, `seconds`).
    """

    kind: str
    begin: int = 0
    end: int = 1 << 30
    rank: int = 0
    peer: int = -1
    node: str = ""
    factor: float = 1.3
    seconds: float = 0.0
    dwell: int = 1


@dataclass
class StepTimes:
    """One step of all ranks, in us; `send` and `receive` are by kind of group, rank and neighbour."""

    own: Numbers
    data: Numbers
    outside: Numbers
    cpu: Numbers
    delay: Numbers
    duration: Numbers
    send: dict[str, Numbers]
    receive: dict[str, Numbers]


@dataclass
class JobModel:
    """A job of `layout` whose steps take `step_s`, with `scatter` in the compute of each rank and step (log normal)."""

    layout: Layout
    seed: int = 0
    step_s: float = 1.0
    scatter: float = 0.01
    disturbances: tuple[Disturbance, ...] = ()
    generation: int = 1
    clock_ns: int = 10**12
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._near = {kind: self.layout.neighbours(kind) for kind in self.layout.kinds()}
        self._places = {kind: self.layout.places(kind) for kind in self.layout.kinds()}

    def profiles(self) -> tuple[MemberProfile, ...]:
        """What each rank says of itself once."""
        sizes = {kind: self.layout.groups(kind).shape[1] for kind in self._near}
        entries: list[list[GroupEntry]] = [[] for _ in range(self.layout.world)]
        for kind, (number, place) in self._places.items():
            hashes = self.layout.group_hash(kind, number).tolist()
            for rank, (value, at) in enumerate(zip(hashes, place.tolist(), strict=True)):
                entries[rank].append(GroupEntry(f"{kind}{number[rank]}", value, int(kind == "pp"), sizes[kind], at))
        return tuple(
            MemberProfile(rank=rank, generation=self.generation, groups=tuple(mine))
            for rank, mine in enumerate(entries)
        )

    def at(self, step: int) -> Iterator[Disturbance]:
        """What goes on in a step."""
        return (one for one in self.disturbances if one.begin <= step < one.end)

    def times(self, step: int) -> StepTimes:
        """One step. Draws from the seed: call it once for each step, in order."""
        world, base = self.layout.world, self.step_s * _US
        own = 0.6 * base * np.exp(self._rng.normal(0.0, self.scatter, world))
        data = 0.02 * base * np.exp(self._rng.normal(0.0, 0.1, world))
        outside, cpu = np.full(world, 0.005 * base), np.full(world, 0.3 * base)
        times = StepTimes(own, data, outside, cpu, np.zeros(world), own, {}, {})
        for one in self.at(step):
            self._disturb(times, one, step=step, base=base)
        self._wait(times, step, base=base)
        return times

    def _disturb(self, times: StepTimes, one: Disturbance, *, step: int, base: float) -> None:
        extra = (one.factor - 1.0) * base
        world, rank = self.layout.world, one.rank
        match one.kind:
            case "slow-compute" | "busy-gil" | "starved":
                times.own[rank] += extra
                times.cpu[rank] += extra if one.kind == "busy-gil" else 0.0
                times.delay[rank] += extra if one.kind == "starved" else 0.0
            case "slow-data":
                times.data[rank] += extra
            case "data-stall":
                times.data += extra
            case "sequence-lengths":
                replica = np.arange(world) // (self.layout.tp * self.layout.pp)
                times.own *= np.exp(self._rng.normal(0.0, 0.3, self.layout.dp))[replica]
            case "heavy-last-stage":
                times.own[self.layout.stages() == self.layout.pp - 1] *= one.factor
            case "garbage-collection" if step % 25 == 3:
                times.own += np.where(self._rng.random(world) < 0.5, 0.5 * base, 0.0)
            case "rotating":
                times.own[step // one.dwell % world] += extra
            case "saving" if step == one.begin:
                times.outside[rank] += one.seconds * _US
            case "recompiling" if step == one.begin:
                times.own[rank] += one.seconds * _US
                times.cpu[rank] += one.seconds * _US

    def _wait(self, times: StepTimes, step: int, *, base: float) -> None:
        """Everybody waits for the slowest; what slow links add comes on top."""
        world = self.layout.world
        busy = times.own + times.data + times.outside
        arrive = busy.max()
        extra = 0.0
        noise = 0.002 * base
        for kind, near in self._near.items():
            there = near >= 0
            lag = np.where(there, busy[np.maximum(near, 0)] - busy[:, None], 0.0)
            late = np.maximum(lag, 0.0) + 0.3 * (arrive - busy)[:, None]
            times.send[kind] = np.where(there, noise * np.exp(self._rng.normal(0, 0.2, (world, 2))), 0.0)
            times.receive[kind] = np.where(there, late / len(self._near) + noise, 0.0)
        for one in self.at(step):
            if one.kind.startswith("throttle"):
                extra = max(extra, (one.factor - 1.0) * base)
                self._throttle(times, one, extra=(one.factor - 1.0) * base)
        for kind, near in self._near.items():
            times.receive[kind] += np.where(near >= 0, 0.4 * extra / len(self._near), 0.0)
        times.duration = arrive - times.outside + 0.2 * base + extra

    def _throttle(self, times: StepTimes, one: Disturbance, *, extra: float) -> None:
        for kind, near in self._near.items():
            ranks = np.arange(self.layout.world)[:, None]
            if one.kind == "throttle-link":
                slow = (ranks == one.rank) & (near == one.peer)
            elif one.kind == "throttle-source":
                slow = (ranks == one.rank) & (near >= 0)
            else:
                per = self.layout.ranks_per_node
                home = int(one.node[1:])
                slow = (ranks // per == home) & (near >= 0) & (near // per != home)
            times.send[kind][slow] += extra
            for rank, column in zip(*np.nonzero(slow), strict=True):
                peer = near[rank, column]
                times.receive[kind][peer, near[peer] == rank] += 0.6 * extra

    def report(self, step: int, times: StepTimes | None = None, *, profiles: bool = False) -> tuple[WatchReport, ...]:
        """What the agents say of one step, one report a node."""
        times = times or self.times(step)
        self.clock_ns += int(float((times.duration + times.outside).max()) * 1e3)
        windows = self.windows(step, times)
        told = self.profiles() if profiles else ()
        per = self.layout.ranks_per_node
        return tuple(
            WatchReport(
                node=self.layout.node(first),
                wall=self.clock_ns / 1e9,
                mono_ns=self.clock_ns,
                windows=windows[first : first + per],
                profiles=told[first : first + per],
            )
            for first in range(0, self.layout.world, per)
        )

    def windows(self, step: int, times: StepTimes) -> tuple[MemberSummary, ...]:
        """The window of every rank, one step long."""
        steps, groups, peers = self._step_table(step, times), self._group_table(times), self._peer_table(times)
        lasted = (times.duration + times.outside).astype(np.int64).tolist()
        cpu, delay = times.cpu.astype(np.int64).tolist(), times.delay.astype(np.int64).tolist()
        return tuple(
            MemberSummary(
                rank,
                self.generation,
                step,
                step,
                self.clock_ns,
                lasted[rank],
                cpu[rank],
                delay[rank],
                0,
                steps[rank].tobytes(),
                groups[rank].tobytes(),
                peers[rank][peers[rank]["sent"] > 0].tobytes(),
            )  # fmt: skip
            for rank in range(self.layout.world)
        )

    def _step_table(self, step: int, times: StepTimes) -> Numbers:
        rows = np.zeros((self.layout.world, 1), STEP_ROW)
        rows["step"] = step
        rows["duration_us"][:, 0], rows["own_us"][:, 0], rows["data_us"][:, 0] = times.duration, times.own, times.data
        return rows

    def _group_table(self, times: StepTimes) -> Numbers:
        rows = np.zeros((self.layout.world, len(self._near)), GROUP_ROW)
        for column, (kind, (number, place)) in enumerate(self._places.items()):
            table = rows[:, column]
            table["hash"], table["lane"] = self.layout.group_hash(kind, number), kind == "pp"
            table["ops"] = 1 << _OPS[kind]
            table["size"], table["group_rank"], table["calls"] = self.layout.groups(kind).shape[1], place, CALLS
            table["nbytes"], table["wire_us"] = 1e8, times.send[kind].sum(axis=1)
            table["peer_us"] = times.receive[kind].sum(axis=1)
            table["busy_us"] = table["peer_us"] + table["wire_us"]
        return rows

    def _peer_table(self, times: StepTimes) -> Numbers:
        rows = np.zeros((self.layout.world, 2 * len(self._near)), PEER_ROW)
        for number, (kind, near) in enumerate(self._near.items()):
            for side in (0, 1):
                table = rows[:, 2 * number + side]
                table["lane"], table["peer"] = kind == "pp", np.maximum(near[:, side], 0)
                table["sent"] = np.where(near[:, side] >= 0, 1e8, 0.0)
                table["wire_us"], table["peer_us"] = times.send[kind][:, side], times.receive[kind][:, side]
        return rows
