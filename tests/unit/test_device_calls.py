"""A process group over a device communicator and over the host, on stand-ins; the fabric ends and settles it.

Not run on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from stand_in_comms import StandInComms, StandInLibrary
from stand_in_device import StandInDevice
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from keepstep.errors import GroupAborted
from keepstep.training.collectives import KeepstepGroup
from keepstep.training.comm_library import How
from keepstep.training.communicator import Communicator
from keepstep.training.copier import Copier
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place

SECRET = b"k" * 32
SIZE = 3


class Member:
    """One rank with a stand-in device and library. Every tensor of 5 or more elements lies on the device."""

    def __init__(self, fabric: Fabric, comms: StandInComms, name: int) -> None:
        self.fabric = fabric
        self.device = StandInDevice()
        self.copier = self.device.copier()
        self.library = StandInLibrary(comms, name)
        self.group = KeepstepGroup(
            fabric, "g", ranks=fabric.ranks, timeout=timedelta(hours=1), on_shutdown=lambda: None
        )
        self.group.devices.copier_of = self.owner
        self.comm = Communicator(self.group.devices, self.library, own=fabric.rank, device=(b"gpu%d" % name).ljust(16))
        self.group.devices.communicator = self.comm

    def owner(self, tensor: torch.Tensor) -> Copier | None:
        return self.copier if tensor.numel() >= 5 else None

    def seen(self, tensor: torch.Tensor) -> list[float]:
        copy = torch.zeros_like(tensor)
        self.device.run(lambda: copy.copy_(tensor))
        self.device.users.record_event().synchronize()
        return copy.tolist()

    def close(self) -> None:
        self.group.shutdown()
        self.fabric.close()
        self.device.close()


class World:
    """Members of one job and its group of all, in this process."""

    def __init__(self) -> None:
        self.comms = StandInComms()
        doors = [Doors(f"m{rank}", "node") for rank in range(SIZE)]
        self.roster = {rank: one.address for rank, one in enumerate(doors)}
        self.members = [self.member(rank, one, 1) for rank, one in enumerate(doors)]
        self.gone: list[Member] = []

    def member(self, rank: int, doors: Doors, generation: int) -> Member:
        directory = RosterDirectory(self.roster)
        place = Place(rank, SIZE, generation)
        fabric = Fabric(doors, place, secret=SECRET, directory=directory, protected=True)
        return Member(fabric, self.comms, 10 * generation + rank)

    def together(self, action: Callable[[Member], object]) -> list[object]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(action, self.members))

    def watch(self) -> None:
        """Has the members watch each other, so that news travel."""
        fabrics = [member.fabric for member in self.members]
        for fabric in fabrics:
            fabric.start_watch()
        for _ in range(2000):
            if all(sum(key[0] == "watch" for key in fabric.inodes()) == SIZE - 1 for fabric in fabrics):
                return
            threading.Event().wait(0.005)
        raise AssertionError("no watch links")

    def replace(self, rank: int, generation: int) -> None:
        doors = Doors(f"m{rank}.{generation}", "node")
        self.roster = {**self.roster, rank: doors.address}
        self.gone.append(self.members[rank])
        self.members[rank] = self.member(rank, doors, generation - 1)
        self.members[rank].fabric.go_local()
        self.together(lambda member: member.fabric.install(generation, self.roster))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for member in (*made.members, *made.gone):
        member.close()


def add(member: Member) -> list[float]:
    tensor = torch.full((6,), member.fabric.rank + 1.0)
    member.group.allreduce([tensor]).wait()
    return member.seen(tensor)


def test_collectives_run_on_the_communicator(world: World) -> None:
    def act(member: Member) -> list[list[float]]:
        every = torch.zeros(5 * SIZE)
        member.group.all_gather_single(every, torch.full((5,), float(member.fabric.rank)), AllgatherOptions()).wait()
        return [add(member), member.seen(every)]

    found = world.together(act)
    assert found == [[[6.0] * 6, [0.0] * 5 + [1.0] * 5 + [2.0] * 5]] * SIZE
    assert all(member.comm.history == [How.REBUILD] for member in world.members)
    assert all(member.copier.pool.made == 0 for member in world.members)


def test_what_the_library_does_not_have_goes_through_the_host(world: World) -> None:
    def act(member: Member) -> list[float]:
        tensor = torch.full((5,), 1 << member.fabric.rank, dtype=torch.int32)
        member.group.allreduce([tensor], ReduceOp.BOR).wait()
        return member.seen(tensor)

    assert world.together(act) == [[7] * 5] * SIZE
    assert all(member.comm.history == [] for member in world.members)


def test_a_loss_ends_calls_on_the_device_and_the_next_generation_has_them_again(world: World) -> None:
    world.together(add)
    stayers = world.members[:2]
    works = [member.group.allreduce([torch.ones(6)]) for member in stayers]
    assert not any(work.is_completed() for work in works)
    for member in stayers:
        member.fabric.poison()
    assert all(work.wait() for work in works)
    assert [member.fabric.agreement() for member in stayers] == [False, False]
    world.replace(2, 2)
    assert world.together(lambda member: member.fabric.agreement()) == [True] * SIZE
    assert world.together(add) == [[6.0] * 6] * SIZE
    assert [member.comm.history[-1] for member in world.members] == [How.GROW] * SIZE


def test_between_two_steps_a_call_that_a_loss_cuts_raises(world: World) -> None:
    """As on the CPU: nobody can do it again."""
    world.together(add)
    stayers = world.members[:2]
    for member in stayers:
        member.fabric.exposed = True
    works = [member.group.allreduce([torch.ones(6)]) for member in stayers]
    for member in stayers:
        member.fabric.poison()
    for work in works:
        with pytest.raises(GroupAborted, match="all_reduce number 2.*between two steps"):
            work.wait()
    with pytest.raises(GroupAborted):
        stayers[0].group.allreduce([torch.ones(6)]).wait()


def test_an_agreement_waits_for_the_device_and_sees_a_failure(world: World) -> None:
    """A communicator that fails while all members live is a broken link: the step is not agreed."""
    world.watch()
    world.together(add)
    assert world.together(lambda member: member.fabric.agreement()) == [True] * SIZE
    world.members[0].library.fails = {"state"}
    told: list[int] = []
    world.members[0].fabric.on_loss = told.append
    assert not any(world.together(lambda member: member.fabric.rank < 2 and member.fabric.agreement()))
    assert told == [2]  # the controller is told of a neighbour, and finds everybody alive: a broken link


def test_members_that_share_a_device_go_through_the_host(world: World) -> None:
    for member in world.members:
        member.group.devices.communicator = Communicator(
            member.group.devices, member.library, own=member.fabric.rank, device=b"the same".ljust(16)
        )
    assert world.together(add) == [[6.0] * 6] * SIZE
    assert all(member.copier.pool.made == 1 for member in world.members)
