"""Collectives of a device's tensors through host memory, on a stand-in device whose streams are threads.

Not run on GPUs: what is shown is the order of copies and kernels, and what an abort leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from stand_in_device import StandInDevice
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, ReduceScatterOptions
from torch.distributed import ReduceOp

from keepstep.errors import UsageError
from keepstep.training import staging
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.communicator import Communicator
from keepstep.training.copier import Copier, StagingPool, copier_of
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place

SECRET = b"k" * 32
SIZE = 3


class Member:
    """One rank with its own stand-in device."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.device = StandInDevice()
        self.copier = self.device.copier()
        self.group = KeepstepGroup(
            fabric, "g", ranks=fabric.ranks, timeout=timedelta(hours=1), on_shutdown=lambda: None
        )
        self.group.devices.copier_of = self.owner
        self.group.devices.communicator = Communicator(self.group.devices, None, own=fabric.rank, device=b"")
        self.owned: set[int] = set()

    def owner(self, tensor: torch.Tensor) -> Copier | None:
        return self.copier if tensor.data_ptr() in self.owned else None

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the device."""
        self.owned.add(values.data_ptr())
        return values

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a kernel of the user's stream sees now."""
        copy = torch.zeros_like(tensor)
        self.device.run(lambda: copy.copy_(tensor))
        self.device.users.record_event().synchronize()
        return copy


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    doors = [Doors(f"m{rank}", "node") for rank in range(SIZE)]
    roster = {rank: one.address for rank, one in enumerate(doors)}
    made = [
        Member(Fabric(one, Place(rank, SIZE, 1), secret=SECRET, directory=RosterDirectory(roster), protected=True))
        for rank, one in enumerate(doors)
    ]
    yield made
    for member in made:
        member.group.shutdown()
        member.fabric.close()
        member.device.close()


def together(members: list[Member], action: Callable[[Member], object]) -> list[object]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(action, members))


def decide(members: list[Member]) -> None:
    """The group's first call on its devices, at which all members settle how such calls are carried out."""
    together(members, lambda member: member.group.allreduce([member.tensor(torch.zeros(1))]).wait())


def test_a_reduction_takes_the_place_of_a_kernel_in_the_users_stream(members: list[Member]) -> None:
    """What the stream wrote before is reduced, what it reads after `wait` is the result; the caller never waits for
    the kernels before."""

    def act(member: Member) -> torch.Tensor:
        tensor = member.tensor(torch.zeros(1000))
        gate = member.device.hold()
        member.device.run(lambda: tensor.fill_(member.fabric.rank + 1.0))
        work = member.group.allreduce([tensor])
        assert not work.is_completed()
        gate.set()
        work.wait()
        return member.seen(tensor)

    assert all(torch.equal(one, torch.full((1000,), 6.0)) for one in together(members, act))


def test_calls_keep_their_order_across_devices_and_sizes(members: list[Member]) -> None:
    """A call on CPU tensors behind one that waits for the device: all ranks still match."""

    def act(member: Member) -> list[float]:
        on_device, on_cpu = member.tensor(torch.zeros(5)), torch.full((7,), float(member.fabric.rank))
        gate = member.device.hold()
        member.device.run(lambda: on_device.fill_(1.0))
        works = [member.group.allreduce([on_device])]
        gate.set()
        works.append(member.group.allreduce([on_cpu]))
        for work in works:
            work.wait()
        return [*member.seen(on_device).tolist(), *on_cpu.tolist()]

    assert together(members, act) == [[3.0] * 5 + [3.0] * 7] * SIZE


@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_large_reductions_are_cut_and_give_the_same(
    members: list[Member], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(staging.StagedPrepared.cut, "__defaults__", (4096,))

    def act(member: Member) -> tuple[torch.Tensor, torch.Tensor, int]:
        values = torch.arange(count, dtype=torch.float64) * (member.fabric.rank + 1)
        tensor = member.tensor(values)
        member.group.allreduce([tensor], ReduceOp.SUM).wait()
        options = BroadcastOptions()
        options.rootRank = 1
        other = member.tensor(torch.full((count,), float(member.fabric.rank)))
        member.group.broadcast([other], options).wait()
        return member.seen(tensor), member.seen(other), member.device.copies

    for summed, sent, copies in together(members, act):  # type: ignore[misc]
        assert torch.equal(summed, torch.arange(count, dtype=torch.float64) * 6)
        assert torch.equal(sent, torch.full((count,), 1.0))
        assert count < 10_000 or copies > 40


def test_gathers_scatters_and_messages(members: list[Member]) -> None:
    def act(member: Member) -> list[object]:
        rank, group = member.fabric.rank, member.group
        gathered = member.tensor(torch.zeros(2 * SIZE))
        group.all_gather_single(gathered, member.tensor(torch.full((2,), float(rank))), AllgatherOptions()).wait()
        part = member.tensor(torch.zeros(2))
        whole = member.tensor(torch.arange(2.0 * SIZE))
        group.reduce_scatter_single(part, whole, ReduceScatterOptions()).wait()
        swapped = member.tensor(torch.zeros(SIZE, dtype=torch.int64))
        group.all_to_all_single(swapped, member.tensor(torch.arange(SIZE) + 10 * rank)).wait()
        box = member.tensor(torch.zeros(4))
        works = [
            group.send([member.tensor(torch.full((4,), float(rank)))], (rank + 1) % SIZE),
            group.recv([box], (rank - 1) % SIZE),
        ]
        for work in works:
            work.wait()
        return [member.seen(one).tolist() for one in (gathered, part, swapped, box)]

    for rank, found in enumerate(together(members, act)):
        assert found == [
            [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            [6.0 * rank, 6.0 * rank + 3.0],
            [rank, 10 + rank, 20 + rank],
            [float((rank - 1) % SIZE)] * 4,
        ]


def test_a_tensor_that_is_not_dense_comes_back_into_its_place(members: list[Member]) -> None:
    def act(member: Member) -> list[float]:
        wide = member.tensor(torch.ones(4, 6))
        member.owned.add(wide[:, ::2].data_ptr())
        member.group.allreduce([wide[:, ::2]]).wait()
        return member.seen(wide)[0].tolist()

    assert together(members, act) == [[3.0, 1.0] * 3] * SIZE


def test_futures_are_completed_behind_the_copy_to_the_device(members: list[Member]) -> None:
    def act(member: Member) -> bool:
        tensor = member.tensor(torch.ones(10))
        future = member.group.allreduce([tensor]).get_future()
        return future.wait()[0] is tensor

    assert all(together(members, act))


def test_poison_ends_what_waits_and_touches_no_data(members: list[Member]) -> None:
    """G-4 for device tensors: a pending call completes, its floats stay as they are, its integers become zero."""
    decide(members)
    member = members[0]
    data, sizes = member.tensor(torch.full((5,), 7.0)), member.tensor(torch.full((2,), 9))
    gate = member.device.hold()
    works = [member.group.allreduce([data]), member.group.allreduce([sizes])]
    member.fabric.poison()
    gate.set()
    assert all(work.wait() for work in works)
    assert member.seen(data).tolist() == [7.0] * 5
    assert member.seen(sizes).tolist() == [0, 0]
    later = member.tensor(torch.full((2,), 3.0))
    assert member.group.allreduce([later]).wait()
    assert member.seen(later).tolist() == [3.0, 3.0]


def test_a_joiner_answers_its_own_set_up(members: list[Member]) -> None:
    member = members[1]
    member.fabric.go_local()
    gathered = member.tensor(torch.zeros(SIZE))
    member.group.all_gather_single(gathered, member.tensor(torch.ones(1)), AllgatherOptions()).wait()
    assert member.seen(gathered).tolist() == [1.0] * SIZE


def test_a_wrong_call_is_told_at_wait(members: list[Member]) -> None:
    decide(members)
    member = members[0]
    odd = member.tensor(torch.zeros(4))
    options = BroadcastOptions()
    options.rootRank = 9
    with pytest.raises(UsageError, match="root"):
        member.group.broadcast([odd], options).wait()


def test_buffers_are_used_again_once_the_device_is_past_them() -> None:
    device = StandInDevice()
    pool = StagingPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    first = pool.take(5000)
    gate = device.hold()
    pool.give([first], device.users.record_event())
    assert pool.take(5000) is not first
    gate.set()
    device.synchronize()
    assert pool.take(8192) is first
    assert pool.made == 2
    device.close()


def test_the_same_buffers_serve_many_calls(members: list[Member]) -> None:
    def act(member: Member) -> int:
        tensor = member.tensor(torch.ones(1000))
        for _ in range(20):
            member.group.allreduce([tensor]).wait()
            member.device.synchronize()
        return member.copier.pool.made

    assert together(members, act) == [1] * SIZE


def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="cpu and cuda"):
        copier_of(torch.device("meta"))
