"""A joiner that has made no backward pass gets the gradient buckets of the stayers, and the other way round (G-2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import StateError
from keepstep.training.buckets import Bucketing, GradientBuckets
from keepstep.training.checkpoint import CheckpointWriter
from keepstep.training.modules import Modules
from keepstep.training.state import TrackedState

FIRST = Bucketing(False, ((0, 1, 2, 3, 4, 5),))
FORMED = Bucketing(True, ((5, 4), (3, 2), (1, 0)))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Fails(torch.autograd.Function):
    """Its backward pass raises where `now` is set."""

    now = False

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise ValueError("not this time")
        return gradient


class Net(nn.Module):
    """Three layers; a backward pass can be ended in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(second(Fails.apply(first(x))))


class Member:
    """One module under DDP that has made some passes."""

    def __init__(self, passes: int = 0) -> None:
        self.module = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
        self.buckets = GradientBuckets(Modules({"model": self.module}))
        for _ in range(passes):
            self.make_pass()

    def make_pass(self, *, fails: bool = False) -> None:
        Fails.now = fails
        try:
            self.module(torch.ones(2, 4)).sum().backward()
        finally:
            Fails.now = False

    @property
    def now(self) -> Bucketing:
        return self.buckets.now()[0]


def test_they_are_formed_behind_the_first_backward_pass() -> None:
    member = Member()
    assert member.now == FIRST
    member.buckets.form()
    assert member.now == FIRST
    member.make_pass()
    member.buckets.form()
    assert member.now == FORMED
    member.make_pass()
    member.buckets.form()
    assert member.now == FORMED


@pytest.mark.parametrize(("passes", "others"), [(0, 2), (2, 0), (1, 1), (0, 0)])
def test_a_joiner_takes_those_of_another(passes: int, others: int) -> None:
    joiner, other = Member(passes), Member(others)
    for one in (joiner, other):
        one.buckets.form()
    joiner.buckets.take(other.buckets.now())
    assert joiner.now == other.now == (FORMED if others else FIRST)
    for one in (joiner, other):
        one.make_pass()
        one.buckets.form()
    assert joiner.now == other.now == FORMED


@pytest.mark.parametrize("passes", [0, 2])
def test_a_backward_pass_that_did_not_end_is_forgotten(passes: int) -> None:
    member = Member(passes)
    before = member.now
    with pytest.raises(ValueError, match="not this time"):
        member.make_pass(fails=True)
    member.buckets.form()
    assert member.now == before == (FORMED if passes else FIRST)
    member.make_pass()
    member.make_pass()
    assert member.now == FORMED


@pytest.mark.parametrize(
    "given",
    [(), (Bucketing(True, ((0, 1),)),), (Bucketing(True, ((0, 1, 2, 3, 4, 4),)),), (Bucketing(True, ()),)],
    ids=["no module", "fewer", "twice", "unknown"],
)
def test_others_that_do_not_fit_are_refused(given: tuple[Bucketing, ...]) -> None:
    with pytest.raises(StateError):
        Member().buckets.take(given)


class Together:
    """The smallest values over some members, each in a thread; nothing where `lost`."""

    def __init__(self, members: int) -> None:
        self.barrier = threading.Barrier(members, timeout=20)
        self.given: list[Sequence[int]] = []

    def least(self, values: Sequence[int]) -> Sequence[int]:
        assert all(-(1 << 31) <= value < 1 << 31 for value in values)
        self.given.append(values)
        self.barrier.wait()
        found = [min(column) for column in zip(*self.given, strict=True)]
        if self.barrier.wait() == 0:
            self.given.clear()
        self.barrier.wait()
        return found


def agree(members: list[Member]) -> list[bool]:
    together = Together(len(members))
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(one.buckets._agree, one.module, rank, least=together.least) for rank, one in enumerate(members)
        ]
        return [one.result() for one in made]


@pytest.mark.parametrize(
    ("passes", "joiner", "wanted"),
    [
        ((2, 0), 1, FORMED),
        ((0, 2), 0, FORMED),
        ((2, 0), 0, FIRST),
        ((0, 2, 0), 1, FIRST),
        ((1, 1), 0, FORMED),
        ((2, 0, 2), -1, FORMED),
    ],
)
def test_all_have_those_of_a_stayer(passes: tuple[int, ...], joiner: int, wanted: Bucketing) -> None:
    members = [Member(number) for number in passes]
    for rank, one in enumerate(members):
        one.buckets.form()
        one.buckets.alone = rank == joiner
    assert all(agree(members))
    assert {one.now for one in members} == {wanted}
    for one in members:
        one.buckets.alone = False
        one.make_pass()
        one.buckets.form()
    assert {one.now for one in members} == {FORMED}


def test_one_that_formed_others_in_its_rehearsal_takes_those_of_the_stayers() -> None:
    """And tells them from then on."""
    joiner, other = Member(2), Bucketing(True, ((5,), (0, 1), (4, 3, 2)))
    joiner.buckets.alone = True
    for _ in range(2):
        joiner.buckets.take((other,))
        assert joiner.now == other
        joiner.make_pass()
        joiner.buckets.form()
    assert joiner.now == other


def test_a_loss_in_between_leaves_them_as_they_were() -> None:
    member = Member()
    assert not member.buckets._agree(member.module, 0, least=lambda values: ())
    assert member.now == FIRST


@pytest.mark.parametrize(("passes", "cap_mb", "wanted"), [(2, 0.0001, FORMED), (0, 0.0001, FIRST), (2, 0.0002, FIRST)])
def test_a_process_that_starts_from_a_checkpoint_goes_on_with_its_buckets(
    tmp_path: Path, passes: int, cap_mb: float, wanted: Bucketing
) -> None:
    """G-2. Where the script asks DDP for others now, these are formed as in any first pass."""
    writer = CheckpointWriter(tmp_path, rank=0, world=1)
    member = Member(passes)
    for step in (2, 3):
        writer.save(step, TrackedState(member.module), private=b"own")
    fresh = DistributedDataParallel(Net(), bucket_cap_mb=cap_mb)
    state = TrackedState(fresh)
    assert writer.load(3, state) == b"own"
    writer.close()
    state.gradient_buckets.form()
    assert state.gradient_buckets.now() == (wanted,)
    for _ in range(2):
        fresh(torch.ones(2, 4)).sum().backward()
    (after,) = state.gradient_buckets.now()
    assert after.final and (after == FORMED or cap_mb > 0.0001)


def test_they_can_be_sent() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FORMED), type=Bucketing) == FORMED
