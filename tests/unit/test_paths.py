"""Planned paths: links leave from the ports of a plan, and change over on all members together or on none (G-19)."""

from __future__ import annotations

import array
import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepstep.records.messages import Address
from keepstep.training.directory import RosterDirectory
from keepstep.training.doors import Doors
from keepstep.training.fabric import Fabric, Place
from keepstep.training.paths import PathPlan, Paths, ends
from keepstep.training.plane import Call, Element, Lane, Op, Reduction, Status
from keepstep.training.spares import Arrived, LinkKey, Spares

RANKS = (0, 1, 2, 3)


def turned(fabric: Fabric) -> int:
    """The plan that a boundary brought."""
    return fabric.turn().plan


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(sock.getsockname()[1] for sock in sockets)
    for sock in sockets:
        sock.close()
    return ports


class Ring:
    """Four members on four nodes that reduce something large together."""

    def __init__(self) -> None:
        doors = [Doors(f"m{rank}", f"node{rank}") for rank in RANKS]
        roster: dict[int, Address] = {rank: door.address for rank, door in enumerate(doors)}
        self.fabrics = [
            Fabric(door, Place(rank, 4, 1), secret=b"k" * 32, directory=RosterDirectory(roster), protected=True)
            for rank, door in enumerate(doors)
        ]
        self.told: list[tuple[int, str]] = []

    def everywhere(self, action):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(action, self.fabrics))

    def reduce(self) -> list[float]:
        def work(fabric: Fabric) -> float:
            channel = fabric.channel("g", Lane.COLLECTIVE, ranks=RANKS)
            values = array.array("f", [fabric.rank + 1.0] * 50_000)
            buffer = (values.buffer_info()[0], 4 * len(values))
            ticket = channel.submit(
                Call(Op.ALL_REDUCE, Element.FLOAT32, Reduction.SUM, inputs=[buffer], outputs=[buffer])
            )
            assert channel.plane.wait(ticket, 20) is Status.DONE
            channel.plane.release(ticket)
            return values[-1]

        return self.everywhere(work)

    def prepare(self, plans: dict[int, PathPlan]) -> None:
        done = threading.Semaphore(0)

        def ready(rank: int):
            def call(why: str) -> None:
                self.told.append((rank, why))
                done.release()

            return call

        for rank, plan in plans.items():
            self.fabrics[rank].prepare_paths(plan, ready=ready(rank))
        for _ in plans:
            assert done.acquire(timeout=20)

    def ends(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Ports by (rank, peer) of the links of the reduction."""
        return {
            (fabric.rank, key.peer): found
            for fabric in self.fabrics
            for key, found in fabric._links.paths._ends.items()
            if key.group == "g"
        }


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    for fabric in made.fabrics:
        fabric.close()


def onward(number: int) -> tuple[dict[int, PathPlan], dict[int, tuple[int, ...]]]:
    """Every member dials the next one from two ports of its own."""
    ports = {rank: free_ports(2) for rank in RANKS}
    plans = {
        rank: PathPlan(number, {(rank + 1) % 4: ports[rank]}, {(rank - 1) % 4: ports[(rank - 1) % 4]}) for rank in RANKS
    }
    return plans, ports


def test_links_change_over_to_the_planned_ports_at_a_boundary(ring: Ring) -> None:
    assert ring.reduce() == [10.0] * 4
    plans, ports = onward(1)
    ring.prepare(plans)
    before = ring.ends()
    assert ring.reduce() == [10.0] * 4, "training goes on over the old links"
    assert ring.ends() == before
    assert ring.everywhere(Fabric.agreement) == [True] * 4
    assert ring.everywhere(turned) == [1] * 4
    after = ring.ends()
    for rank in RANKS:
        local, remote = after[rank, (rank + 1) % 4]
        assert local in ports[rank]
        assert after[(rank + 1) % 4, rank] == (remote, local)
    assert ring.reduce() == [10.0] * 4
    assert ring.everywhere(Fabric.agreement) == [True] * 4
    assert ring.everywhere(turned) == [0] * 4
    assert {why for _, why in ring.told} == {""}


def test_a_second_plan_moves_only_the_links_whose_ports_changed(ring: Ring) -> None:
    ring.reduce()
    plans, ports = onward(1)
    ring.prepare(plans)
    ring.everywhere(Fabric.agreement)
    ring.everywhere(turned)
    before = ring.ends()
    moved = free_ports(2)
    second = {rank: PathPlan(2, dict(plan.dial), dict(plan.accept)) for rank, plan in plans.items()}
    second[0].dial[1], second[1].accept[0] = moved, moved
    ring.prepare(second)
    ring.everywhere(Fabric.agreement)
    assert ring.everywhere(turned) == [2] * 4
    after = ring.ends()
    assert {pair for pair in after if after[pair] != before[pair]} == {(0, 1), (1, 0)}
    assert after[0, 1][0] in moved
    assert ring.reduce() == [10.0] * 4


def test_nobody_changes_over_while_one_member_has_not_prepared(ring: Ring) -> None:
    ring.reduce()
    before = ring.ends()
    plans, _ = onward(1)
    for rank in (0, 1, 2):
        ring.fabrics[rank].prepare_paths(plans[rank], ready=lambda why: None)
    assert ring.everywhere(Fabric.agreement) == [True] * 4
    assert ring.everywhere(turned) == [0] * 4
    assert ring.ends() == before
    assert ring.reduce() == [10.0] * 4


def test_links_made_after_a_plan_leave_from_its_ports(ring: Ring) -> None:
    plans, ports = onward(1)
    ring.prepare(plans)
    assert ring.reduce() == [10.0] * 4
    assert all(ring.ends()[rank, (rank + 1) % 4][0] in ports[rank] for rank in RANKS)


def test_ports_in_use_are_passed_over(ring: Ring) -> None:
    ring.reduce()
    taken = socket.create_server(("127.0.0.1", 0))
    plans, ports = onward(1)
    plans[0].dial[1] = plans[1].accept[0] = (taken.getsockname()[1], *ports[0])
    ring.prepare(plans)
    taken.close()
    ring.everywhere(Fabric.agreement)
    assert ring.everywhere(turned) == [1] * 4
    assert ring.ends()[0, 1][0] in ports[0]


def test_a_peer_that_cannot_be_reached_over_its_path_is_told_and_nothing_changes() -> None:
    key = LinkKey("g", 0, 1)
    listener = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listener.getsockname())

    def refuse(asked: LinkKey, number: int) -> Arrived:
        raise OSError("no route")

    paths = Paths(refuse)
    paths.note(key, here)
    said: list[str] = []
    told = threading.Event()
    paths.prepare(PathPlan(3, {1: (1,)}), [key], ready=lambda why: (said.append(why), told.set()))
    assert told.wait(10)
    assert "rank 1 was not reached: no route" in said[0]
    assert paths.prepared == 0
    here.close()
    listener.close()


def test_a_link_that_arrives_before_its_plan_waits_for_it(ring: Ring) -> None:
    ring.reduce()
    plans, ports = onward(1)
    told = threading.Semaphore(0)
    ring.fabrics[0].prepare_paths(plans[0], ready=lambda why: None)  # dials rank 1, which knows nothing yet
    paths = ring.fabrics[1]._links.paths
    for _ in range(2000):
        if paths._spares._kept:
            break
        threading.Event().wait(0.005)
    for rank in (1, 2, 3):
        ring.fabrics[rank].prepare_paths(plans[rank], ready=lambda why: told.release())
    assert all(told.acquire(timeout=10) for _ in range(3))


def test_a_link_that_came_early_for_a_newer_plan_stays_while_an_older_one_is_made() -> None:
    key = LinkKey("g", 0, 1)
    early, older = socket.socketpair()
    spares = Spares(lambda asked, number: Arrived(older))
    said: list[str] = []
    spares.arrived(key, 2, arrived=Arrived(early))
    spares.expect(1, [key], dial=[], ready=said.append)
    spares.arrived(key, 1, arrived=Arrived(older))
    assert (said, older.fileno()) == ([], -1)
    spares.expect(2, [key], dial=[], ready=said.append)
    assert said == [""]
    assert spares.take(2) == {key: Arrived(early)}
    early.close()


def test_a_change_of_members_voids_what_was_prepared(ring: Ring) -> None:
    ring.reduce()
    plans, _ = onward(1)
    ring.prepare(plans)
    roster = {fabric.rank: fabric.address for fabric in ring.fabrics}
    ring.everywhere(lambda fabric: fabric.install(2, roster))
    assert ring.everywhere(Fabric.agreement) == [True] * 4
    assert ring.everywhere(turned) == [0] * 4
    assert ring.reduce() == [10.0] * 4


def test_ports_come_round_again_however_often_plans_change(ring: Ring) -> None:
    ring.reduce()
    plans, ports = onward(1)
    for number in range(1, 7):
        other = {rank: free_ports(1) for rank in RANKS}
        for plan in (
            plans,
            {
                rank: PathPlan(number, {(rank + 1) % 4: other[rank]}, {(rank - 1) % 4: other[(rank - 1) % 4]})
                for rank in RANKS
            },
        ):
            ring.number = getattr(ring, "number", 0) + 1
            ring.prepare({rank: PathPlan(ring.number, one.dial, one.accept) for rank, one in plan.items()})
            ring.everywhere(Fabric.agreement)
            assert ring.everywhere(turned) == [ring.number] * 4
            if plan is plans:
                assert all(ring.ends()[rank, (rank + 1) % 4][0] in ports[rank] for rank in RANKS)
            assert ring.reduce() == [10.0] * 4


def test_a_connection_whose_other_side_is_gone_has_no_ends() -> None:
    """A link that dies while it is being attached is for the plane to report, not for the thread that dialled it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with sock:
            assert ends(sock)[1] == listener.getsockname()[1]
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()
            select.select([sock], [], [], 20)
            assert ends(sock) == (0, 0)
