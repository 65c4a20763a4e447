"""The process group over fabrics of one process: poison, local answers, errors, time-outs, abort."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions
from torch.distributed import DistBackendError, ReduceOp

from keepstep.errors import UsageError
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Mode, Place

SECRET = b"k" * 32
HOUR = timedelta(hours=1)


class World:
    """`size` members with one group, all in this process."""

    def __init__(self, size: int, *, protected: bool) -> None:
        doors = [Doors(f"m{rank}", "node") for rank in range(size)]
        self.roster = {rank: one.address for rank, one in enumerate(doors)}
        self.fabrics = [
            Fabric(
                one, Place(rank, size, 1), secret=SECRET, directory=RosterDirectory(self.roster), protected=protected
            )
            for rank, one in enumerate(doors)
        ]
        self.shut: list[int] = []
        self.groups = [self.group(rank, "g", HOUR) for rank in range(size)]

    def group(self, rank: int, name: str, timeout: timedelta) -> KeepstepGroup:
        fabric = self.fabrics[rank]
        return KeepstepGroup(
            fabric, name, ranks=fabric.ranks, timeout=timeout, on_shutdown=lambda: self.shut.append(rank)
        )

    def together(self, action: Callable[[KeepstepGroup], object]) -> list[object]:
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(action, self.groups))

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        for fabric in self.fabrics:
            fabric.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(size: int = 2, *, protected: bool = True) -> World:
        made.append(World(size, protected=protected))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_a_sum_arrives_everywhere(worlds: Callable[..., World]) -> None:
    def add(group: KeepstepGroup) -> list[float]:
        tensor = torch.tensor([1.0, float(group.rank())])
        assert group.allreduce([tensor]).wait()
        return tensor.tolist()

    assert worlds(3).together(add) == [[3.0, 3.0]] * 3


def test_poison_ends_pending_collectives_and_clamps_integers(worlds: Callable[..., World]) -> None:
    """G-4: nothing raises, integer outputs are zero, the future is completed with its tensors."""
    world = worlds()
    sizes, data = torch.full((2,), 12345, dtype=torch.int64), torch.ones(4)
    pending = [world.groups[0].allreduce([sizes]), world.groups[0].allreduce([data])]
    future = pending[1].get_future()
    assert not pending[0].is_completed()
    world.fabrics[0].poison()
    assert all(work.wait() for work in pending)
    assert sizes.tolist() == [0, 0]
    assert future.wait()[0] is data
    later = torch.full((3,), 7, dtype=torch.int32)
    assert world.groups[0].broadcast([later], _root(1)).wait()
    assert later.tolist() == [0, 0, 0]
    assert world.groups[0].barrier().wait()


def _root(rank: int) -> object:
    options = BroadcastOptions()
    options.rootRank = rank
    return options


def test_poison_ends_a_wait_of_another_thread(worlds: Callable[..., World]) -> None:
    world = worlds()
    options = AllreduceOptions()
    options.asyncOp = False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: world.groups[0].allreduce([torch.ones(1000)], options).wait())
        world.fabrics[0].poison()
        assert waiting.result(timeout=10) is True


def test_install_makes_the_group_work_again(worlds: Callable[..., World]) -> None:
    world = worlds(3)
    world.groups[0].allreduce([torch.ones(100_000)])
    for fabric in world.fabrics:
        fabric.poison()
    for fabric in world.fabrics:
        fabric.install(2, world.roster)

    def add(group: KeepstepGroup) -> float:
        tensor = torch.ones(50_000)
        group.allreduce([tensor]).wait()
        return float(tensor.sum())

    assert world.together(add) == [150_000.0] * 3


def test_local_mode_answers_alone(worlds: Callable[..., World]) -> None:
    world = worlds(2)
    fabric, group = world.fabrics[1], world.groups[1]
    fabric.go_local()
    assert fabric.mode is Mode.LOCAL
    outputs, own = [torch.zeros(2), torch.zeros(2)], torch.tensor([1.0, 2.0])
    assert group.allgather([outputs], [own]).wait()
    assert [one.tolist() for one in outputs] == [[1.0, 2.0]] * 2
    part = torch.zeros(1)
    work = group.reduce_scatter_single(part, own)
    assert (work.wait(), part.tolist(), work.get_future().value()[0] is part) == (True, [2.0], True)
    strided = torch.arange(6.0).view(2, 3).t()
    assert group.broadcast([strided], _root(0)).wait()
    assert strided.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert group.barrier().wait()


def test_a_time_out_names_what_did_not_happen(worlds: Callable[..., World]) -> None:
    world = worlds(2, protected=False)
    group = world.group(0, "impatient", timedelta(milliseconds=50))
    with pytest.raises(DistBackendError, match=r"all_reduce number 1 of group 'impatient' on rank 0.*->"):
        group.allreduce([torch.ones(3)]).wait()
    group.shutdown()


def test_a_wait_may_have_a_limit_of_its_own(worlds: Callable[..., World]) -> None:
    world = worlds(2, protected=False)
    work = world.groups[0].allreduce([torch.ones(3)])
    with pytest.raises(DistBackendError, match="not done in the time"):
        work.wait(timedelta(milliseconds=20))
    other = world.groups[1].allreduce([torch.ones(3)])
    assert other.wait()
    assert work.wait()


def test_sizes_that_differ_are_an_error_that_tells_what_to_do(worlds: Callable[..., World]) -> None:
    world = worlds(2, protected=False)

    def differ(group: KeepstepGroup) -> str:
        with pytest.raises(DistBackendError) as caught:
            group.allreduce([torch.ones(3 + group.rank())]).wait()
        return str(caught.value)

    assert all("the same calls with the same sizes" in str(said) for said in world.together(differ))


def test_abort_frees_whoever_waits(worlds: Callable[..., World]) -> None:
    world = worlds(2, protected=False)
    errors: list[BaseException] = []
    started = threading.Event()

    def receive() -> None:
        started.set()
        try:
            world.groups[0].recv([torch.zeros(3)], 1, 0).wait()
        except DistBackendError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    started.wait(10)
    world.groups[0].abort()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert world.shut == [0]
    with pytest.raises(DistBackendError, match="shut down"):
        world.groups[0].barrier()


def test_the_source_of_a_receive_is_known(worlds: Callable[..., World]) -> None:
    world = worlds(3)

    def exchange(group: KeepstepGroup) -> set[int]:
        if group.rank():
            group.send([torch.ones(2)], 0, 5).wait()
            return set()
        works = [group.recv_anysource([torch.zeros(2)], 5) for _ in range(2)]
        for work in works:
            work.wait()
        return {work._source_rank() for work in works}

    assert world.together(exchange)[0] == {1, 2}


def test_what_the_plane_does_not_take_is_a_usage_error(worlds: Callable[..., World]) -> None:
    group = worlds(1).groups[0]
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.BAND
    with pytest.raises(UsageError):
        group.allreduce([torch.ones(3)], options)
    with pytest.raises(UsageError, match="FakeTensor"), torch._subclasses.FakeTensorMode():
        group.allreduce([torch.ones(3)])


def test_a_name_may_be_used_again(worlds: Callable[..., World]) -> None:
    """One member may make the new group while the other has not closed the old one yet."""
    world = worlds(2)
    world.together(lambda group: group.barrier().wait())
    for first in (0, 1):
        world.groups[first].shutdown()
        world.groups[first] = world.group(first, "g", HOUR)
        early = world.groups[first].allreduce([tensor := torch.ones(3)])
        world.groups[1 - first].shutdown()
        world.groups[1 - first] = world.group(1 - first, "g", HOUR)
        assert world.groups[1 - first].allreduce([torch.ones(3)]).wait()
        assert early.wait()
        assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_a_group_of_one_does_everything_alone(worlds: Callable[..., World]) -> None:
    group = worlds(1).groups[0]
    tensor, output = torch.arange(3.0), torch.zeros(3)
    assert group.allreduce([tensor]).wait()
    assert group.all_gather_single(output, tensor, AllgatherOptions()).wait()
    assert group.barrier().wait()
    assert (tensor.tolist(), output.tolist()) == ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
