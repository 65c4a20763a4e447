"""Members that move, at the fabric: links are prepared beside training, and all change at one boundary or none does."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep.records.messages import Address
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Mode, Place
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status
from keepstep.training.turning import Move, MoveVote

RANKS = (0, 1, 2, 3)
NODES = {"shared": "aaaa", "tcp": "abcd", "mixed": "aabb"}


def until(reached: Callable[[], bool]) -> None:
    """Waits for a background thread to bring something about."""
    for _ in range(2000):
        if reached():
            return
        threading.Event().wait(0.005)
    assert reached()


class World:
    """Four members that train, and joiners beside them."""

    def __init__(self, nodes: Sequence[str]) -> None:
        doors = [Doors(f"m{rank}", node) for rank, node in enumerate(nodes)]
        self.roster: dict[int, Address] = {rank: one.address for rank, one in enumerate(doors)}
        self.lost: list[tuple[int, int]] = []
        self.asked: list[tuple[int, int]] = []
        self.fabrics = [self.member(rank, one) for rank, one in enumerate(doors)]
        self.joiners: dict[int, Fabric] = {}
        self.gone: list[Fabric] = []

    def member(self, rank: int, doors: Doors) -> Fabric:
        directory = RosterDirectory(self.roster)
        directory.ask = lambda wanted: self.asked.append((rank, wanted))
        fabric = Fabric(doors, Place(rank, 4, 1), secret=b"k" * 32, directory=directory, protected=True)
        fabric.on_loss = lambda gone: self.lost.append((rank, gone))
        return fabric

    def everywhere(self, action: Callable[[Fabric], object], fabrics: Sequence[Fabric] = ()) -> list[object]:
        members = fabrics or self.fabrics
        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(action, members))

    def reduce(self) -> None:
        def work(fabric: Fabric) -> float:
            channel = fabric.channel("g", Lane.COLLECTIVE, ranks=RANKS)
            values = array.array("f", [fabric.rank + 1.0] * 50_000)
            buffer = (values.buffer_info()[0], 4 * len(values))
            call = Call(Op.ALL_REDUCE, Element.FLOAT32, Reduction.SUM, inputs=[buffer], outputs=[buffer])
            ticket = channel.submit(call)
            assert channel.plane.wait(ticket, 20) is Status.DONE
            channel.plane.release(ticket)
            return values[-1]

        assert self.everywhere(work) == [10.0] * 4

    def step(self) -> list[object]:
        self.reduce()
        assert self.everywhere(Fabric.agreement) == [True] * 4
        return self.everywhere(lambda fabric: fabric.turn().move)

    def start_joiners(self, where: dict[int, str]) -> dict[int, Address]:
        for rank, node in where.items():
            doors = Doors(f"joiner{rank}", node)
            self.joiners[rank] = self.member(rank, doors)
            self.joiners[rank].go_local()
        return {rank: fabric.address for rank, fabric in self.joiners.items()}

    def prepare(self, number: int, where: dict[int, str], *, asked: Sequence[int] = RANKS) -> dict[int, Address]:
        """Everything up to the commit; only the ranks in `asked` are told of the move."""
        ranks = self.start_joiners(where)
        told = threading.Semaphore(0)
        for rank in asked:
            move = Move(number, 2, ranks, rank in where)
            self.fabrics[rank].prepare_move(move, ready=lambda why: told.release() if not why else None)
            if rank in where:
                self.fabrics[rank].turning.ready(number)
                told.release()
        assert all(told.acquire(timeout=20) for _ in asked)
        return ranks

    def make(self, votes: list[object], ranks: dict[int, Address]) -> None:
        """What members do after a vote that has passed."""
        self.roster = {**self.roster, **ranks}
        vote = votes[0]
        assert isinstance(vote, MoveVote) and vote.passed
        assert all(one == vote for one in votes)
        for rank in vote.ranks:
            self.fabrics[rank].stand_down()
            self.gone.append(self.fabrics[rank])
            self.fabrics[rank] = self.joiners.pop(rank)
        stayers = [fabric for fabric in self.fabrics if fabric.rank not in vote.ranks]
        self.everywhere(lambda fabric: fabric.install_move(vote), stayers)
        for rank in vote.ranks:
            self.fabrics[rank].install_move(vote, roster=self.roster)

    def close(self) -> None:
        for fabric in (*self.fabrics, *self.joiners.values(), *self.gone):
            fabric.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(nodes: Sequence[str] = "aaaa") -> World:
        made.append(World(nodes))
        return made[-1]

    yield make
    for world in made:
        world.close()


def links_of(fabric: Fabric, without: set[int]) -> dict[tuple[str, int, int], int]:
    return {key: inode for key, inode in fabric.inodes().items() if key[2] not in without}


@pytest.mark.parametrize("moving", [(1,), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_member_moves_at_a_boundary(worlds: Callable[..., World], nodes: str, moving: tuple[int, ...]) -> None:
    """G-7, G-22: links between stayers are the same sockets, those to the joiner were made before."""
    world = worlds(nodes)
    world.everywhere(Fabric.start_watch)
    assert world.step() == [None] * 4
    until(lambda: all(("watch", -1, o) in f.inodes() for f in world.fabrics for o in set(RANKS) - {f.rank}))
    ranks = world.prepare(1, dict.fromkeys(moving, "b"))
    assert world.step() == [None] * 4, "prepared is not committed"
    before = {fabric.rank: links_of(fabric, set(moving)) for fabric in world.fabrics if fabric.rank not in moving}
    for rank in moving:
        world.fabrics[rank].turning.commit(1)
    world.make(world.step(), ranks)
    after = {fabric.rank: links_of(fabric, set()) for fabric in world.fabrics}
    for rank, kept in before.items():
        assert kept
        assert {key: after[rank].get(key) for key in kept} == kept
        prepared = {key[2] for key in after[rank] if key[0] == "g"}
        assert prepared >= {key[2] for key in kept if key[0] == "g"}
    for _ in range(2):
        assert world.step() == [None] * 4
    assert world.lost == []
    assert all(fabric.mode is Mode.LIVE and fabric.generation == 2 for fabric in world.fabrics)
    assert world.asked == []


def test_what_the_leaver_closes_afterwards_is_no_loss(worlds: Callable[..., World]) -> None:
    world = worlds("ab" * 2)
    world.everywhere(Fabric.start_watch)
    world.step()
    until(lambda: all(("watch", -1, o) in f.inodes() for f in world.fabrics for o in set(RANKS) - {f.rank}))
    ranks = world.prepare(1, {3: "a"})
    world.fabrics[3].turning.commit(1)
    world.make(world.step(), ranks)
    world.step()
    world.gone[0].close()
    world.step()
    assert world.lost == []
    assert all(not fabric.left for fabric in world.fabrics)


@pytest.mark.parametrize("moving", [(1,), (2, 3)], ids=str)
def test_who_was_not_asked_drops_its_links_and_asks_for_the_address(
    worlds: Callable[..., World], moving: tuple[int, ...]
) -> None:
    world = worlds("abab")
    world.step()
    ranks = world.prepare(1, dict.fromkeys(moving, "a"), asked=moving)
    world.fabrics[moving[0]].turning.commit(1)
    world.make(world.step(), ranks)
    answered = threading.Thread(target=answer, args=(world, ranks))
    answered.start()
    world.step()
    world.close()
    answered.join(20)
    assert world.lost == []
    assert {wanted for _, wanted in world.asked} <= set(moving)


def answer(world: World, ranks: dict[int, Address]) -> None:
    """What the controller does when somebody asks, until the world is closed."""
    done = 0
    while not all(fabric._closed for fabric in world.fabrics):
        for asker, rank in world.asked[done:]:
            done += 1
            world.fabrics[asker].directory.pass_on(rank, ranks[rank])
        threading.Event().wait(0.002)


@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_nobody_changes_while_one_member_is_not_ready(worlds: Callable[..., World], lacking: int) -> None:
    """G-22"""
    world = worlds("aabb")
    world.step()
    before = [fabric.inodes() for fabric in world.fabrics]
    world.prepare(1, {1: "b"})
    world.fabrics[lacking].turning.ready(1, yes=False)
    world.fabrics[1].turning.commit(1)
    votes = world.step()
    assert [vote.unready for vote in votes if isinstance(vote, MoveVote)] == [(lacking,)] * 4
    assert not any(vote.passed for vote in votes if isinstance(vote, MoveVote))
    assert world.step() == [None] * 4, "it was asked once"
    for fabric in world.fabrics:
        fabric.cancel_move()
    assert world.step() == [None] * 4
    assert [fabric.inodes() for fabric in world.fabrics] == before
    assert world.lost == []


def test_a_leaver_that_is_told_late_asks_for_no_second_vote(worlds: Callable[..., World]) -> None:
    """Two leavers are told one after the other: the vote that the first one asked for is that of both."""
    world = worlds("aabb")
    world.step()
    ranks = world.prepare(1, {1: "b", 2: "b"})
    world.fabrics[0].turning.ready(1, yes=False)
    world.fabrics[1].turning.commit(1)
    assert not any(vote.passed for vote in world.step() if isinstance(vote, MoveVote))
    world.fabrics[0].turning.ready(1)
    world.fabrics[2].turning.commit(1)
    assert world.step() == [None] * 4
    world.fabrics[2].turning.commit(1, failed=1)
    world.make(world.step(), ranks)
    assert world.step() == [None] * 4


def test_a_call_that_still_runs_holds_a_move_up(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.step()
    world.prepare(1, {2: "a"})
    world.fabrics[2].turning.commit(1)
    world.reduce()
    assert world.everywhere(Fabric.agreement) == [True] * 4
    waiting = array.array("f", [0.0])
    channel = world.fabrics[0].channel("p", Lane.P2P, ranks=RANKS)
    ticket = channel.submit(Call(Op.RECV, Element.FLOAT32, peer=1, outputs=[(waiting.buffer_info()[0], 4)]))
    votes = world.everywhere(lambda fabric: fabric.turn().move)
    assert [vote.unready for vote in votes if isinstance(vote, MoveVote)] == [(0,)] * 4
    world.fabrics[0].poison()
    channel.plane.wait(ticket, 10)
    channel.plane.release(ticket)


def test_a_change_of_members_voids_a_move(worlds: Callable[..., World]) -> None:
    world = worlds("aabb")
    world.step()
    world.prepare(1, {1: "b"})
    world.fabrics[1].turning.commit(1)
    world.everywhere(lambda fabric: fabric.install(2, world.roster))
    assert world.step() == [None] * 4
    assert world.lost == []


def test_a_leaver_that_must_stay_after_all_takes_part_again(worlds: Callable[..., World]) -> None:
    """The joiner died before it took the rank: a later generation gives it back."""
    world = worlds("aabb")
    world.step()
    world.prepare(1, {1: "b"})
    world.fabrics[1].turning.commit(1)
    votes = world.step()
    vote = votes[0]
    assert isinstance(vote, MoveVote) and vote.passed
    leaver = world.fabrics[1]
    leaver.stand_down()
    world.everywhere(lambda fabric: fabric.install_move(vote), [f for f in world.fabrics if f is not leaver])
    world.joiners.pop(1).close()
    for fabric in world.fabrics:
        fabric.poison()
    world.everywhere(lambda fabric: fabric.install(3, world.roster, renew=True))
    assert world.step() == [None] * 4
    assert leaver.mode is Mode.LIVE


def test_an_address_that_moved_is_asked_for_and_admits_anybody_but_the_former_member() -> None:
    old, new = Address("old", "n", "l", "h", 1), Address("new", "n", "l", "h", 2)
    directory = RosterDirectory({0: old})
    directory.pass_on(0, None)
    directory.ask = lambda rank: directory.pass_on(rank, new)
    assert not directory.admits(0, "old")
    assert directory.admits(0, "new")
    assert not directory.admits(0, "third")
    assert directory.replace({0: new}) == frozenset(), "its links are right already"
    directory.pass_on(0, None)
    assert directory.resolve(0, 1.0) == new
