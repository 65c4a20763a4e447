"""Jobs that record nothing: hangs and slow members by stacks and processor time, and what is no fault."""

from __future__ import annotations

import random

import pytest

from keepstep.diagnosis.plain import PlainChange, PlainWatch
from keepstep.records.events import Finding, Suspect
from keepstep.records.plain_samples import PlainReport, PlainSample
from keepstep.service.analysis_process import Analysis
from keepstep.service.analysis_wire import Begin, Look, Standing

WORLD = 4


class Job:
    """Looks at four ranks, one a second; `looks(rank, second)` gives (place, stack, cpu seconds so far)."""

    def __init__(self, *, hang_s: float = 5.0, clock_s: float = 0.0) -> None:
        self.watch = PlainWatch(WORLD, hang_s=hang_s)
        self.clock_s = clock_s
        self.second = 0
        self.changes: list[PlainChange] = []

    def run(
        self, seconds: int, looks, *, state=lambda rank: "S", member=lambda rank: f"m{rank}", delay=0, turns=0
    ) -> None:
        for _ in range(seconds):
            self.second += 1
            samples = []
            for rank in range(WORLD):
                place, stack, cpu_s = looks(rank, self.second)
                waits = delay * self.second if rank == 1 else 0
                where = f"train.py:{stack % 100}"
                samples.append(
                    PlainSample(
                        rank,
                        member(rank),
                        state(rank),
                        int(cpu_s * 1e6),
                        waits,
                        place,
                        stack,
                        where,
                        turns=turns * self.second,
                    )
                )
            wall = self.second + self.clock_s
            report = PlainReport(node="n0", wall=wall, samples=tuple(samples), network_bytes=0)
            self.changes += self.watch.observe([report], float(self.second))

    @property
    def alarms(self) -> list[PlainChange]:
        return [c for c in self.changes if c.finding.kind not in ("undetermined", "imbalance", "healthy")]


def works(rank: int, second: int):
    return "program", random.Random(rank * 1000 + second).randrange(1, 10**6), second * 0.5


def test_a_job_that_works_gives_nothing() -> None:
    job = Job()
    job.run(60, works)
    assert job.changes == []


@pytest.mark.parametrize(("turns", "kind"), [(6, "compute_slow"), (1, "noncommunication_hang")])
def test_light_steps_that_every_look_meets_at_the_same_place_are_no_hang(turns: int, kind: str) -> None:
    """Steps of 0.4 s that use no processor worth mention; a thread that polls once a second makes none."""
    job = Job(hang_s=2.0)
    job.run(20, works)
    job.run(20, lambda rank, second: ("data" if rank == 2 else "collective", 7 + rank, 10.0), turns=turns)
    assert [c.finding.kind for c in job.alarms if c.status == "new"] == [kind]


@pytest.mark.parametrize(
    ("place", "layer"), [("lock", "application"), ("data", "dataloader"), ("program", "undetermined")]
)
def test_the_one_outside_the_collectives_is_the_origin(place: str, layer: str) -> None:
    job = Job()
    job.run(5, works)
    job.run(25, lambda rank, second: (place, 7, 2.5) if rank == 2 else ("collective", 9, 2.5))
    (new, *later) = job.alarms
    assert (new.status, new.finding.kind, new.finding.layer) == ("new", "noncommunication_hang", layer)
    assert new.finding.suspects == ((Suspect(rank=2),),) and new.finding.victims == (0, 1, 3)
    assert not new.hard and [c.hard for c in later] == [True]


def test_a_frozen_process_is_named_although_its_stack_is_unknown() -> None:
    job = Job()
    job.run(
        12,
        lambda rank, second: ("unknown", 0, 2.5) if rank == 3 else ("collective", 9, 2.5),
        state=lambda rank: "T" if rank == 3 else "S",
    )
    finding = job.alarms[0].finding
    assert (finding.layer, finding.suspects) == ("host_cpu", ((Suspect(rank=3),),))


def test_one_rank_in_another_collective_is_a_mismatch_and_never_hard() -> None:
    job = Job()
    job.run(60, lambda rank, second: ("collective", 20 if rank == 1 else 30, 2.5))
    assert [c.finding.kind for c in job.alarms] == ["collective_mismatch"]
    assert job.alarms[0].finding.suspects == ((Suspect(rank=1),),) and not any(c.hard for c in job.changes)


def test_all_in_one_collective_blames_nobody_in_particular() -> None:
    job = Job()
    job.run(60, lambda rank, second: ("collective", 30, 2.5))
    (change,) = job.alarms
    assert change.finding.kind == "communication_hang" and len(change.finding.suspects[0]) == WORLD
    assert not change.hard


def test_a_rank_that_computes_or_moves_while_others_wait_is_no_hang() -> None:
    job = Job()
    job.run(30, lambda rank, second: ("storage", 7, second * 0.9) if rank == 0 else ("collective", 9, 1.0))
    job.run(30, lambda rank, second: ("program", second, 27.0) if rank == 0 else ("collective", 9, 1.0))
    assert all(c.finding.kind == "compute_slow" for c in job.alarms)


def test_several_outside_single_nobody_out() -> None:
    job = Job()
    job.run(60, lambda rank, second: ("program", 7, 2.5) if rank < 3 else ("collective", 9, 2.5))
    assert job.alarms == [] and [c.finding.kind for c in job.changes] == ["undetermined"]


def slow_loader(rank: int, second: int):
    place = "data" if rank == 1 else ("collective" if second % 5 else "program")
    return place, second * 10 + rank, second * 0.2


def test_a_slow_loader_is_named_and_becomes_hard_when_it_lasts() -> None:
    job = Job()
    job.run(16, slow_loader)
    (new,) = job.alarms
    assert (new.finding.kind, new.finding.layer, new.finding.rank) == ("compute_slow", "dataloader", 1)
    assert not new.hard
    job.run(40, slow_loader)
    assert [c.hard for c in job.alarms] == [False, True]


@pytest.mark.parametrize("clock_s", [-300.0, 300.0])
def test_the_clock_of_a_node_may_be_wrong(clock_s: float) -> None:
    job = Job(clock_s=clock_s)
    job.run(10, lambda rank, second: ("program", 7, 2.5) if rank == 2 else ("collective", 9, 2.5))
    assert [c.finding.suspects for c in job.alarms] == [((Suspect(rank=2),),)]
    job.run(40, slow_loader)
    assert [c.finding.rank for c in job.alarms if c.finding.kind == "compute_slow"][:1] == [1]


def test_a_straggler_that_rotates_is_nobody() -> None:
    job = Job()
    job.run(120, lambda rank, s: ("program" if rank == s // 3 % WORLD else "collective", s * 10 + rank, s * 0.2))
    assert job.changes == []


def test_a_rank_without_a_processor_is_not_called_slow() -> None:
    job = Job()
    job.run(30, slow_loader, delay=900_000)
    assert job.alarms == [] and {c.finding.layer for c in job.changes} == {"host_cpu"}


def test_a_job_started_again_is_looked_at_afresh() -> None:
    job = Job()
    job.run(8, lambda rank, second: ("lock", 7, 2.5) if rank == 2 else ("collective", 9, 2.5))
    job.run(1, works, member=lambda rank: f"again{rank}")
    assert [c.status for c in job.changes] == ["new", "ended"]
    job.run(20, works, member=lambda rank: f"again{rank}")
    assert len(job.changes) == 2


def test_looks_at_a_hang_make_nobody_slow() -> None:
    job = Job()
    job.run(5, works)
    job.run(25, lambda rank, second: ("lock", 7, 2.5) if rank == 2 else ("collective", 9, 2.5))
    job.run(20, works)
    assert {c.finding.kind for c in job.changes} == {"noncommunication_hang"}


def test_while_a_rank_is_missing_nothing_is_said() -> None:
    watch = PlainWatch(WORLD, hang_s=1.0)
    for second in range(20):
        samples = tuple(PlainSample(rank, f"m{rank}", "S", 0, 0, "collective", 9) for rank in range(WORLD - 1))
        assert watch.observe([PlainReport(node="n", wall=float(second), samples=samples)], float(second)) == ()


def test_a_hang_in_which_a_thread_wakes_for_a_moment_or_a_stack_is_not_seen_is_the_same_hang() -> None:
    job = Job()

    def hangs(rank: int, second: int):
        used_s = 2.5 + 0.08 * (second >= 14)
        place, stack = ("lock", 7) if rank == 1 else ("collective", 9)
        return place, 0 if second == 24 and rank == 1 else stack, used_s

    job.run(40, hangs)
    assert "ended" not in [c.status for c in job.changes] and len({c.key for c in job.changes}) == 1
    job.run(7, works)
    assert job.changes[-1].status == "ended"


def test_a_hang_after_which_a_rank_spins_at_the_same_place_has_ended() -> None:
    job = Job()
    job.run(10, lambda rank, second: ("lock", 7, 2.5) if rank == 1 else ("collective", 9, 2.5))
    job.run(15, lambda rank, second: ("lock", 7, second * 0.9) if rank == 1 else ("collective", 9, 2.5))
    assert [c.status for c in job.changes if c.key == job.changes[0].key] == ["new", "ended"]


def locked(rank: int, second: int):
    return ("lock", 7, 2.5) if rank == 1 else ("collective", 9, 2.5)


@pytest.mark.parametrize(
    ("goes_on", "shown"), [(locked, ["updated", "updated"]), (works, ["ended"]), (slow_loader, ["new", "ended"])]
)
def test_what_an_earlier_watch_left_open_is_taken_up_until_it_can_be_judged(goes_on, shown: list[str]) -> None:
    job = Job()
    job.run(8, locked)
    (left,) = job.changes
    job.watch, job.changes = PlainWatch(WORLD, hang_s=5.0, open=[left]), []
    job.run(14, goes_on)
    assert "ended" not in [change.status for change in job.changes]
    job.run(16, goes_on)
    assert [change.status for change in job.changes] == shown


class Process:
    """The analysis process in place of its watch."""

    def __init__(self, *left: Standing) -> None:
        self.analysis = Analysis(Begin("job", WORLD, open=left))

    def observe(self, reports: list[PlainReport], now: float) -> tuple[Standing, ...]:
        return self.analysis.look(Look(now, plain=tuple(reports))).changes


def test_another_analysis_process_ends_what_has_passed() -> None:
    hang = Finding(kind="noncommunication_hang", suspects=((Suspect(rank=1),),))
    job = Job()
    job.watch = Process(Standing("plain:noncommunication_hang", "new", hang))
    job.run(30, works)
    assert [(change.status, change.finding) for change in job.changes] == [("ended", hang)]
