"""Device communicators of a group over changes of its membership, on a stand-in library. Not run on GPUs.

The members of a group are threads here; their data plane is a meeting point.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from stand_in_comms import StandInComms, StandInLibrary
from stand_in_device import StandInDevice

from keepstep.errors import GroupAborted, TransportError
from keepstep.training.comm_library import GROW, REVOKE, How, Report, formation_of
from keepstep.training.communicator import Communicator
from keepstep.training.direct_work import DirectPrepared, DirectWork
from keepstep.training.plane import Call, Element, Op, Reduction

SIZE = 4


class Table:
    """Where the members of a group exchange bytes, and the generation they are in."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.rounds: dict[tuple[int, int], dict[int, bytes]] = {}
        self.generation = 1
        self.live = True
        self.exposed = False

    def poison(self) -> None:
        with self.lock:
            self.live = False
            self.lock.notify_all()


class Seat:
    """A member's view of its group."""

    def __init__(self, table: Table, own: int) -> None:
        self._table, self._own = table, own
        self._round = 0
        self._in = 0

    @property
    def generation(self) -> int:
        return self._table.generation

    @property
    def live(self) -> bool:
        return self._table.live

    @property
    def exposed(self) -> bool:
        return self._table.exposed

    def exchange(self, data: bytes) -> list[bytes] | None:
        table = self._table
        if self._in != table.generation:
            self._in, self._round = table.generation, 0
        self._round += 1
        with table.lock:
            given = table.rounds.setdefault((table.generation, self._round), {})
            given[self._own] = data
            table.lock.notify_all()
            assert table.lock.wait_for(lambda: len(given) == SIZE or not table.live, 20)
            return [given[role] for role in range(SIZE)] if len(given) == SIZE else None


class Member:
    """One role: its device, its library and its communicator."""

    def __init__(self, world: World, role: int, version: int) -> None:
        self.role = role
        self.device = StandInDevice()
        self.copier = self.device.copier()
        self.library = StandInLibrary(world.comms, next(world.names), version=version)
        self.gave_up: queue.SimpleQueue[str] = queue.SimpleQueue()
        device = (b"gpu%d" % next(world.names)).ljust(16)
        self.comm_group = Seat(world.table, role)
        self.comm = Communicator(self.comm_group, self.library, own=role, device=device, give_up=self.gave_up.put)

    def launch(self, call: Callable[[DirectPrepared], Call], result: object) -> DirectWork:
        prepared = DirectPrepared(result, self.copier)
        return self.comm.run([call(prepared)], prepared, blame=self.blame)

    def blame(self) -> Exception | None:
        return GroupAborted("cut") if self.comm_group.exposed else None

    def seen(self, tensor: torch.Tensor) -> list[float]:
        copy = torch.zeros_like(tensor)
        self.device.run(lambda: copy.copy_(tensor))
        self.device.users.record_event().synchronize()
        return copy.tolist()


class World:
    """All members of one group."""

    def __init__(self, version: int) -> None:
        self.comms, self.table = StandInComms(), Table()
        self.names = iter(range(100))
        self.version = version
        self.members = [Member(self, role, version) for role in range(SIZE)]
        self.gone: list[Member] = []

    def together(self, action: Callable[[Member], object]) -> list[object]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(action, self.members))

    def ready(self) -> list[object]:
        return self.together(lambda member: member.comm.ready())

    def lose(self, *roles: int) -> None:
        """The members of `roles` are gone, all others hear of it."""
        self.table.poison()
        for member in self.members:
            if member.role not in roles:
                member.comm.stop()

    def replace(self, *roles: int) -> None:
        for role in roles:
            self.gone.append(self.members[role])
            self.members[role] = Member(self, role, self.version)
        self.table.generation += 1
        self.table.live = True

    def did(self) -> list[str]:
        """What the libraries were asked since the last time, each once, in order."""
        log, self.comms.log[:] = list(dict.fromkeys(what for _, what in self.comms.log)), []
        return log


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(version: int = GROW) -> World:
        made.append(World(version))
        return made[-1]

    yield make
    for world in made:
        for member in (*world.members, *world.gone):
            member.comm.close()
            member.device.close()


def add(member: Member) -> list[float]:
    tensor = torch.zeros(3)
    member.device.run(lambda: tensor.fill_(member.role + 1.0))
    member.launch(lambda prepared: summed(prepared, tensor), [tensor]).wait()
    return member.seen(tensor)


def summed(prepared: DirectPrepared, tensor: torch.Tensor) -> Call:
    span = prepared.update(tensor)
    return Call(Op.ALL_REDUCE, Element.FLOAT32, Reduction.SUM, inputs=[span], outputs=[span])


def gather(member: Member) -> list[float]:
    own, every = torch.full((2,), float(member.role)), torch.zeros(2 * SIZE)

    def call(prepared: DirectPrepared) -> Call:
        (start, nbytes), source = prepared.write(every), prepared.read(own)
        part = nbytes // SIZE
        return Call(Op.ALL_GATHER, inputs=[source], outputs=[(start + part * n, part) for n in range(SIZE)])

    member.launch(call, [every]).wait()
    return member.seen(every)


EVERYBODY = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_the_first_call_makes_it_and_later_ones_use_it(worlds: Callable[..., World]) -> None:
    world = worlds()
    assert world.ready() == [True] * SIZE
    assert world.together(add) == [[10.0] * 3] * SIZE
    assert world.ready() == [True] * SIZE
    assert world.together(gather) == [EVERYBODY] * SIZE
    assert world.did() == ["unique_id", "form"]


def test_a_replaced_member_comes_last_and_keeps_its_role(worlds: Callable[..., World]) -> None:
    """Grow puts the newcomer at the end; results are in the order of the roles all the same."""
    world = worlds()
    world.ready()
    world.lose(1)
    world.replace(1)
    world.did()
    assert world.ready() == [True] * SIZE
    assert [member.comm.order for member in world.members] == [(0, 2, 3, 1)] * SIZE
    assert world.together(add) == [[10.0] * 3] * SIZE
    assert world.together(gather) == [EVERYBODY] * SIZE
    assert world.did() == ["shrink with abort", "abort", "unique_id", "grow"]
    assert all(member.comm.history[-1] is How.GROW for member in world.members)


def test_pending_calls_complete_and_the_old_one_is_revoked(worlds: Callable[..., World]) -> None:
    """G-4: a call that one member never makes ends for the others; nothing raises, whole numbers are zeroed."""
    world = worlds()
    world.ready()
    sizes = [torch.full((2,), 9, dtype=torch.int64) for _ in range(SIZE - 1)]

    def call(prepared: DirectPrepared, tensor: torch.Tensor) -> Call:
        span = prepared.update(tensor)
        return Call(Op.ALL_REDUCE, Element.INT64, Reduction.SUM, inputs=[span], outputs=[span])

    stayers = world.members[: SIZE - 1]
    works = [
        member.launch(lambda prepared, one=one: call(prepared, one), [one])
        for member, one in zip(stayers, sizes, strict=True)
    ]
    assert not any(work.is_completed() for work in works)
    world.lose(SIZE - 1)
    assert [work.wait() for work in works] == [True] * (SIZE - 1)
    assert [member.seen(one) for member, one in zip(stayers, sizes, strict=True)] == [[0, 0]] * (SIZE - 1)
    assert not any(member.comm.settled() for member in stayers)
    assert [member.comm.ready() for member in stayers] == [False] * (SIZE - 1)
    world.replace(SIZE - 1)
    assert world.ready() == [True] * SIZE
    assert world.together(add) == [[10.0] * 3] * SIZE
    did = world.did()
    assert did.index("revoke") < did.index("shrink") < did.index("abort") < did.index("grow")
    assert "shrink with abort" not in did


@pytest.mark.parametrize("version", [22602, 22703, REVOKE])
def test_older_libraries_make_it_anew(worlds: Callable[..., World], version: int) -> None:
    world = worlds(version)
    world.ready()
    pending = [member.launch(lambda p: summed(p, torch.ones(3)), []) for member in world.members[:2]]
    world.lose(3)
    assert all(work.wait() for work in pending)
    world.replace(3)
    world.did()
    assert world.ready() == [True] * SIZE
    assert world.members[0].comm.order == (0, 1, 2, 3)
    assert world.together(gather) == [EVERYBODY] * SIZE
    assert "grow" not in world.did()


def test_a_group_that_lost_nobody_and_has_nothing_pending_is_kept(worlds: Callable[..., World]) -> None:
    """Only affected groups change: a loss elsewhere costs this one an exchange."""
    world = worlds()
    world.ready()
    world.together(add)
    world.lose()
    world.replace()
    world.did()
    assert world.ready() == [True] * SIZE
    assert world.did() == []
    assert world.together(add) == [[10.0] * 3] * SIZE


def test_one_member_that_cut_its_side_makes_all_form_anew(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ready()
    work = world.members[2].launch(lambda p: summed(p, torch.ones(3)), [])
    world.lose()
    assert work.wait()
    world.replace()
    assert world.ready() == [True] * SIZE
    assert [member.comm.history for member in world.members] == [[How.REBUILD, How.REBUILD]] * SIZE
    assert world.together(add) == [[10.0] * 3] * SIZE


def test_a_planned_move_changes_one_that_is_whole(worlds: Callable[..., World]) -> None:
    """No loss, nothing poisoned: the next generation has another member."""
    world = worlds()
    world.ready()
    world.together(add)
    world.replace(0)
    assert world.ready() == [True] * SIZE
    assert world.members[0].comm.order == (1, 2, 3, 0)
    assert world.together(gather) == [EVERYBODY] * SIZE


def test_two_changes_in_a_row(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ready()
    for roles in ((1,), (0, 2), (3,)):
        world.lose(*roles)
        world.replace(*roles)
        assert world.ready() == [True] * SIZE
        assert world.together(gather) == [EVERYBODY] * SIZE
    assert world.members[3].comm.order == (1, 0, 2, 3)


@pytest.mark.parametrize("failing", ["shrink", "shrink with abort", "grow"])
def test_a_member_that_cannot_grow_makes_all_form_anew(worlds: Callable[..., World], failing: str) -> None:
    world = worlds()
    world.ready()
    world.members[2].library.fails = {failing}
    world.lose(1)
    world.replace(1)
    assert world.ready() == [True] * SIZE
    assert world.together(gather) == [EVERYBODY] * SIZE


@pytest.mark.parametrize("failing", ["form", "unique_id"])
def test_where_nothing_works_tensors_go_through_the_host(worlds: Callable[..., World], failing: str) -> None:
    world = worlds()
    world.members[0].library.fails = {failing}
    assert world.ready() == [False] * SIZE
    assert all(member.comm.history == [How.HOST] for member in world.members)


def test_a_further_loss_while_it_is_made_ends_that(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ready()
    world.lose(1)
    world.replace(1)
    with ThreadPoolExecutor(SIZE) as pool:
        some = [pool.submit(member.comm.ready) for member in world.members if member.role != 1]
        world.lose(1)
        assert [one.result(20) for one in some] == [False] * (SIZE - 1)
    world.replace(1)
    assert world.ready() == [True] * SIZE
    assert world.together(gather) == [EVERYBODY] * SIZE


@pytest.fixture
def stuck(worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> tuple[World, Member]:
    """A world and its first member, whose aborts hang and which gives up soon."""
    monkeypatch.setattr("keepstep.training.communicator._END_LIMIT_S", 0.05)
    world = worlds(22602)
    world.ready()
    member = world.members[0]
    member.library.abort_hangs = threading.Event()
    return world, member


def test_a_member_whose_abort_hangs_gives_up(stuck: tuple[World, Member]) -> None:
    world, member = stuck
    work = member.launch(lambda p: summed(p, torch.ones(3)), [])
    world.lose(3)
    world.replace(3)
    with pytest.raises(TransportError, match="cannot be ended"):
        member.comm.ready()
    assert "not ended" in member.gave_up.get(timeout=20)
    member.library.abort_hangs.set()
    assert work.wait()


@pytest.mark.parametrize("version", [GROW, 22602])
def test_a_loss_ends_what_the_agreement_waits_for(worlds: Callable[..., World], version: int) -> None:
    """G-4: whoever waits for the device when the loss comes is let go."""
    world = worlds(version)
    world.ready()
    stayers = world.members[:3]
    works = [member.launch(lambda p: summed(p, torch.ones(3)), []) for member in stayers]
    with ThreadPoolExecutor(SIZE) as pool:
        settled = [pool.submit(member.comm.settled) for member in stayers]
        assert all(work._event.awaited.wait(20) for work in works)  # all three stand in `settled`
        world.lose(3)
        assert [one.result(20) for one in settled] == [False] * 3
    assert all(work.wait() for work in works)


def test_a_member_whose_abort_hangs_at_the_agreement_gives_up(stuck: tuple[World, Member]) -> None:
    """The training thread waits for the device there, and nobody comes to the next generation."""
    world, member = stuck
    member.launch(lambda p: summed(p, torch.ones(3)), [])
    world.lose(3)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(member.comm.settled)
        assert "not ended" in member.gave_up.get(timeout=20)
        member.library.abort_hangs.set()
        assert settled.result(20) is False


def test_nobody_gives_up_for_a_group_that_is_over(stuck: tuple[World, Member]) -> None:
    _, member = stuck
    work = member.launch(lambda p: summed(p, torch.ones(3)), [])
    member.comm.close()
    with pytest.raises(queue.Empty):
        member.gave_up.get(timeout=0.2)
    member.library.abort_hangs.set()
    assert work.wait()


def test_between_two_steps_a_call_that_a_loss_cuts_raises(worlds: Callable[..., World]) -> None:
    """Nobody can do it again. What was complete before the loss has its result."""
    world = worlds()
    world.ready()
    world.table.exposed = True
    tensors = [torch.full((3,), member.role + 1.0) for member in world.members]
    done = [
        member.launch(lambda p, one=one: summed(p, one), [one])
        for member, one in zip(world.members, tensors, strict=True)
    ]
    for work in done:
        work.await_device()
    stayers = world.members[:3]
    cut = [member.launch(lambda p: summed(p, torch.ones(3)), []) for member in stayers]
    world.lose(3)
    for work in cut:
        with pytest.raises(GroupAborted):
            work.wait()
        assert not work.is_success() and isinstance(work.exception(), GroupAborted)
        with pytest.raises(GroupAborted):
            work.get_future().wait()
    assert all(work.wait() for work in done)
    assert [member.seen(one) for member, one in zip(world.members, tensors, strict=True)] == [[10.0] * 3] * SIZE
    late = stayers[0].launch(lambda p: summed(p, torch.ones(3)), [])
    with pytest.raises(GroupAborted):
        late.wait()


def test_a_failure_of_the_library_is_seen_at_the_agreement(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.ready()
    world.together(add)
    assert all(world.together(lambda member: member.comm.settled()))
    world.members[1].library.fails = {"state"}
    assert [member.comm.settled() for member in world.members] == [True, False, True, True]


def report(version: int = GROW, device: int = 0, serial: int = 0, rank: int = -1, **flags: bool) -> Report:
    return Report(version, bytes([device]) * 16, serial, rank, flags.get("whole", False), flags.get("revoked", False))


def test_who_shares_a_device_or_has_no_library_goes_through_the_host() -> None:
    assert formation_of([report(device=1), report(device=1)]).how is How.HOST
    assert formation_of([report(device=1), report(0, device=2)]).how is How.HOST
    assert formation_of([report(device=1)]).how is How.HOST
    assert formation_of([report(device=1), report(device=2)]).how is How.REBUILD


def test_the_oldest_library_of_a_group_decides() -> None:
    old = [report(device=1, serial=3, rank=0, whole=True), report(REVOKE, device=2)]
    assert formation_of(old).how is How.REBUILD
    new = [report(device=1, serial=3, rank=0, whole=True), report(device=2)]
    assert formation_of(new) == (How.GROW, (0, 1), 4, (1,), True)


def test_a_report_is_packed_and_unpacked() -> None:
    one = report(device=7, serial=9, rank=2, revoked=True)
    assert Report.unpack(one.pack()) == one
    assert len(one.pack()) == Report.size()
