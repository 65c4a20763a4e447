"""A data stream gives the batches of an interrupted step again, and goes on bit for bit in another process."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from keepstep.errors import StateError, TornRecord, UsageError
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.data import Batches
from keepstep.training.joining import Membership
from keepstep.training.private import apply, capture, within_reach
from keepstep.training.rng import capture_rng, restore_rng
from keepstep.training.state import TrackedState
from keepstep.training.tiers import Tier, Tiers
from keepstep.training.user_job import Job

SIZE = 21


class Noisy(Dataset[torch.Tensor]):
    """Draws from every generator for every sample, and counts how many samples were made."""

    made = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made += 1
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


class Plain(Dataset[torch.Tensor]):
    """Draws nothing, as a dataset inside worker processes must."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    """Shuffles itself."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(17).tolist():
            yield torch.tensor([float(index)])


class Remembering:
    """An iterable whose iterator keeps its own state."""

    def __iter__(self) -> Remembering.Reader:
        return self.Reader()

    class Reader:
        """Counts."""

        at = 0

        def __iter__(self) -> Remembering.Reader:
            return self

        def __next__(self) -> torch.Tensor:
            if self.at == 5:
                raise StopIteration
            self.at += 1
            return torch.tensor([float(self.at)])

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]


def seeded() -> torch.Generator:
    """A generator of the user's own."""
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(Noisy(), 4),
    "shuffle": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Noisy(), 4, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=seeded()),
    "no_batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(Noisy(), 4, sampler=DistributedSampler(Noisy(), 2, 1)),
    "replacement": lambda: DataLoader(Noisy(), 4, sampler=RandomSampler(Noisy(), replacement=True)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE, generator=seeded())),
    "iterable": lambda: DataLoader(Stream(), 4),
    "list": lambda: [torch.tensor([float(index)]) for index in range(7)],
    "own_state": lambda: Remembering(),
    "stateful": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True),
    "stateful_generator": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True, generator=seeded()),
}
WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stateful_workers": lambda: StatefulDataLoader(Plain(), 4, shuffle=True, num_workers=2),
}


def seed(number: int) -> None:
    """Seed everything."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def lost_and_found(build: Callable[[], Any], steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The batches a rank reads after `steps`, and those that its successor reads."""
    seed(1)
    lost = Batches(build())
    for _ in range(steps):
        lost.begin_step()
        next(lost)
        torch.rand(1)
        lost.commit()
    private = capture([lost])
    wanted = [next(lost) for _ in range(9)]
    seed(77)
    found = Batches(build())
    apply(private, [found])
    return wanted, [next(found) for _ in range(9)]


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 6, 11])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_successor_reads_the_same_batches(loader: str, steps: int) -> None:
    wanted, got = lost_and_found(LOADERS[loader], steps)
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


@pytest.mark.parametrize("steps", [2, 8])
@pytest.mark.parametrize("loader", WORKERS)
def test_worker_processes(loader: str, steps: int) -> None:
    wanted, got = lost_and_found(WORKERS[loader], steps)
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


def test_a_map_style_loader_skips_without_fetching() -> None:
    lost = Batches(DataLoader(Noisy(), 4, shuffle=True))
    for _ in range(4):
        next(lost)
    lost.commit()
    data = Noisy()
    found = Batches(DataLoader(data, 4, shuffle=True))
    found.seek(lost.position())
    assert data.made == 0
    next(found)
    assert data.made == 4


@pytest.mark.parametrize("loader", ["shuffle", "iterable", "stateful", "list", "own_state"])
def test_a_redone_step_gets_the_same_objects(loader: str) -> None:
    stream = Batches(LOADERS[loader]())
    next(stream)
    stream.begin_step()
    first = [next(stream) for _ in range(9)]
    stream.redo()
    second = [next(stream) for _ in range(4)]
    stream.redo()
    third = [next(stream) for _ in range(10)]
    assert all(one is other for one, other in zip(first, third, strict=False))
    assert all(one is other for one, other in zip(second, third, strict=False))


@pytest.mark.parametrize("loader", LOADERS)
def test_random_draws_of_a_redone_step_are_those_of_an_undisturbed_one(loader: str) -> None:
    def step(stream: Batches) -> list[list[float]]:
        return [[*next(stream).flatten().tolist(), torch.rand(()).item(), random.random()] for _ in range(3)]

    runs = []
    for disturbed in (False, True):
        seed(5)
        stream = Batches(LOADERS[loader]())
        runs.append([])
        for number in range(5):
            stream.begin_step()
            states = capture_rng()
            if disturbed and number in (0, 1, 4):
                step(stream)
                stream.redo()
                restore_rng(states)
            runs[-1].append(step(stream))
            stream.commit()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("within", [False, True])
def test_the_position_is_that_of_the_last_boundary(loader: str, within: bool) -> None:
    """Also where a poisoned step took more batches than the redone one, and while a step is open."""
    seed(3)
    lost = Batches(LOADERS[loader]())
    for number in range(3):
        lost.begin_step()
        for _ in range(5):
            next(lost)
        lost.redo()
        kept = [next(lost) for _ in range(number)]
        lost.commit()
        assert len(kept) == number
    lost.begin_step()
    if within:
        next(lost)
        lost.redo()
        next(lost)
    position = lost.position()
    lost.redo()
    found = Batches(LOADERS[loader]())
    states = capture_rng()
    found.seek(position)
    assert capture_rng() == states
    assert next(found)[..., 0].tolist() == next(lost)[..., 0].tolist()
    assert found.epoch == lost.epoch


@pytest.mark.parametrize("loader", LOADERS)
def test_the_position_a_step_will_leave_if_it_counts(loader: str) -> None:
    seed(6)
    lost = Batches(LOADERS[loader]())
    for taken in (2, 4, 3):
        lost.begin_step()
        for _ in range(taken):
            next(lost)
        private, states = capture([lost], counting=True), capture_rng()
        lost.commit()
        found = Batches(LOADERS[loader]())
        apply(private, [found])
        got = [next(found) for _ in range(3)]
        restore_rng(states)
        lost.begin_step()
        wanted = [next(lost) for _ in range(3)]
        assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
        lost.redo()
        restore_rng(states)


@pytest.mark.parametrize("loader", [*LOADERS, "persistent"])
@pytest.mark.parametrize("steps", [0, 2, 8])
def test_a_used_stream_goes_back(loader: str, steps: int) -> None:
    """As it must where all members return to a checkpoint."""
    seed(8)
    stream = Batches((LOADERS | WORKERS)[loader]())
    for _ in range(steps):
        next(stream)
    stream.commit()
    private = capture([stream])
    wanted = [next(stream) for _ in range(9)]
    apply(private, [stream])
    got = [next(stream) for _ in range(9)]
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


def test_epochs_are_told_to_samplers() -> None:
    sampler = DistributedSampler(Plain(), 2, 0)
    stream = Batches(DataLoader(Plain(), 4, sampler=sampler))
    orders = [[next(stream).flatten().tolist() for _ in range(3)] for _ in range(3)]
    assert sampler.epoch == 2 and stream.epoch == 2
    assert orders[0] != orders[1] != orders[2]


def test_several_streams_in_one_private_state() -> None:
    def build() -> list[Batches]:
        return [Batches(LOADERS["shuffle"](), name="train"), Batches(LOADERS["list"](), name="valid")]

    seed(1)
    lost = build()
    for _ in range(3):
        next(lost[0])
        next(lost[1])
    for stream in lost:
        stream.commit()
    private = capture(lost)
    wanted = [next(stream) for stream in lost for _ in range(2)]
    seed(2)
    found = build()
    apply(private, found)
    got = [next(stream) for stream in found for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
    with pytest.raises(StateError):
        apply(private, found[:1])


def test_streams_that_cannot_go_on_say_so() -> None:
    with pytest.raises(UsageError):
        Batches(3)
    with pytest.raises(UsageError, match="no batches"):
        next(Batches([]))
    once = Batches(iter([1, 2]))
    assert [next(once), next(once)] == [1, 2]
    with pytest.raises(UsageError):
        next(once)
    endless = Batches(count())
    for _ in range(4):
        next(endless)
    endless.commit()
    other = Batches(count())
    other.seek(endless.position())
    assert next(other) == 4
    with pytest.raises(StateError):
        Batches([1, 2]).seek(endless.position())
    with pytest.raises(StateError):
        Batches([1, 2]).seek({"epoch": "?"})


def of_iterator(stream: Batches, steps: range, *, kept: int = 0) -> list[bytes]:
    """Makes `steps` of two batches each, keeping those of the last `kept` steps; gives the states at their starts."""
    states = []
    for version in steps:
        stream.begin_step(version, oldest=version - kept)
        states.append(capture([stream]))
        next(stream)
        next(stream)
        stream.commit()
    return states


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_iterator_goes_on_where_another_one_was_although_it_was_rehearsed_with(steps: int) -> None:
    lost = Batches(count())
    for _ in range(steps):
        lost.begin_step()
        next(lost)
        next(lost)
        lost.commit()
    private = capture([lost])
    found = Batches(count())
    found.begin_step()
    next(found)
    next(found)
    found.redo()
    apply(private, [found])
    assert [next(found) for _ in range(5)] == [next(lost) for _ in range(5)]
    assert found.position()["consumed"] == 2 * steps


def test_an_iterator_goes_back_as_far_as_its_batches_are_kept() -> None:
    stream = Batches(count())
    states = of_iterator(stream, range(6), kept=2)
    assert [within_reach(state, [stream]) for state in states] == [False, False, False, True, True, True]
    apply(states[3], [stream])
    of_iterator(stream, range(3, 4), kept=1)
    stream.begin_step(4, oldest=3)
    assert [next(stream) for _ in range(2)] == [8, 9]
    stream.redo()
    assert [next(stream) for _ in range(6)] == [8, 9, 10, 11, 12, 13]
    assert within_reach(states[3], [stream]) and not within_reach(states[2], [stream])
    with pytest.raises(StateError, match="back"):
        apply(states[2], [stream])


def test_random_draws_are_the_same_after_an_iterator_went_back() -> None:
    def noise() -> Iterator[float]:
        while True:
            yield torch.rand(()).item()

    stream, states, drawn = Batches(noise()), [], []
    for version in (0, 1, 2, 3, 1, 2, 3):
        if len(states) == 4 and len(drawn) == 4:
            apply(states[1], [stream])
        stream.begin_step(version, oldest=0)
        states.append(capture([stream]))
        drawn.append((next(stream), torch.rand(()).item(), next(stream)))
        stream.commit()
    assert drawn[1:4] == drawn[4:7] and states[1:4] == states[4:7]


def test_an_iterator_with_fewer_batches_is_named() -> None:
    lost = Batches(count())
    states = of_iterator(lost, range(3))
    found = Batches(iter([0, 1, 2]))
    next(found)
    with pytest.raises(StateError, match="fewer batches"):
        apply(states[2], [found])


def test_checkpoints_that_an_iterator_cannot_go_back_to_are_left_out(tmp_path: Path) -> None:
    stream, state = Batches(count()), TrackedState(torch.nn.Linear(2, 2))
    tiers = Tiers()
    tiers.set([Tier(CheckpointWriter(tmp_path, rank=0, world=1), 1)])
    tiers.save(2, state, private=of_iterator(stream, range(3))[2], replicas={})
    assert tiers.valid_steps([stream]).steps == (2,)
    stream.begin_step(3)
    found = tiers.valid_steps([stream])
    assert found.steps == () and "step 2" in found.skipped[0] and "iterator" in found.skipped[0]
    assert tiers.valid_steps([Batches(count())]).steps == (2,)
    tiers.close()


def test_an_unprotected_job_keeps_no_batches() -> None:
    job = Job(Membership(rank=0, world=1, attempt=0, guard=None))
    stream = job.data(DataLoader(Plain(), 4))
    seen = [weakref.ref(next(stream)) for _ in range(9)]
    assert [ref() for ref in seen] == [None] * 9 and stream.epoch == 1


def test_all_generators_come_back() -> None:
    numpy.random.standard_normal()
    random.gauss(0, 1)
    states = capture_rng()

    def draw() -> list[float]:
        own = [torch.rand(()).item(), torch.randn(5).sum().item(), random.gauss(0, 1), random.random()]
        return [*own, numpy.random.standard_normal(), numpy.random.rand()]

    wanted = draw()
    assert draw() != wanted
    restore_rng(states)
    assert capture_rng() == states
    assert draw() == wanted


def test_an_untouched_numpy_is_read_once_and_a_touched_one_again() -> None:
    numpy.random.seed(4)
    one = capture_rng()["numpy"]
    assert capture_rng()["numpy"] is one
    numpy.random.standard_normal()
    two = capture_rng()["numpy"]
    numpy.random.standard_normal()
    three = capture_rng()["numpy"]
    assert len({one, two, three}) == 3


def test_private_state_that_is_none() -> None:
    before = capture_rng()
    apply(b"")
    assert capture_rng() == before
    with pytest.raises(TornRecord):
        apply(b"nonsense")
    with pytest.raises(TornRecord):
        apply(capture()[:-3])
    with pytest.raises(TornRecord):
        restore_rng({"torch": b"", "random": b""})
