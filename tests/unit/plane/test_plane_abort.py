"""Poison frees everything at any moment, and after install the same links carry the next generation."""

from __future__ import annotations

import os
import random
import select
import threading

import numpy as np
import pytest
from plane_rig import KINDS, Group, all_reduce, link, span, spans

from keepstep.training.plane import Call, Element, Lane, Op, Status

LIMIT_S = 20.0


def inode_of(plane, peer):
    return os.fstat(plane.link_fd(peer)).st_ino


def check(group: Group) -> None:
    """A large and a small all_reduce and an all_gather give the right numbers."""
    size = group.size
    for count in (3, 60_001):
        arrays = [np.full(count, r + 1, np.float32) for r in range(size)]
        statuses = group.run([all_reduce(a) for a in arrays])
        assert statuses == [Status.DONE] * size
        assert all((a == size * (size + 1) / 2).all() for a in arrays)
    parts = [np.full(5_000, r, np.int32) for r in range(size)]
    rows = [[np.zeros(5_000, np.int32) for _ in range(size)] for _ in range(size)]
    calls = [Call(Op.ALL_GATHER, inputs=[span(parts[r])], outputs=spans(rows[r])) for r in range(size)]
    assert group.run(calls) == [Status.DONE] * size
    assert all((rows[r][s] == s).all() for r in range(size) for s in range(size))


def start_some(group: Group, rng: random.Random) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Submits a few calls, on some members not all of them; returns (rank, ticket) and what they write to."""
    tickets, arrays = [], []
    for _ in range(rng.randrange(1, 5)):
        count = rng.choice([1, 200, 20_000, 400_000, 1_500_000])
        missing = rng.choice([None, *range(group.size)])
        for rank, plane in enumerate(group.planes):
            array = np.ones(count, np.float32)
            arrays.append(array)
            if rank == missing:
                continue
            tickets.append((rank, plane.submit(all_reduce(array))))
        if missing is not None:
            break
    return tickets, arrays


def spin(rng: random.Random) -> None:
    """Lets a random short time pass without reading a clock."""
    total = 0
    for i in range(rng.choice([0, 10, 1_000, 30_000])):
        total += i


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("seed", range(3))
def test_abort_at_random_moments_and_replace_a_member(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}{seed}")
    group = Group(4, KINDS[kind], protected=True)
    inodes = {(p.rank, q): inode_of(p, q) for p in group.planes for q in p.linked()}
    gone: set[int] = set()
    for generation in range(1, 31):
        tickets, arrays = start_some(group, rng)
        spin(rng)
        order = list(range(4))
        rng.shuffle(order)
        for rank in order:
            group.domains[rank].poison()
        before = [a.copy() for a in arrays]
        for rank, ticket in tickets:
            assert group.planes[rank].wait(ticket, LIMIT_S) in (Status.ABORTED, Status.DONE)
            group.planes[rank].release(ticket)
        late = group.planes[0].submit(all_reduce(arrays[0]))
        assert group.planes[0].wait(late, LIMIT_S) is Status.ABORTED
        group.planes[0].release(late)
        if generation % 3 == 0:
            gone.add(rng.randrange(4))
            group.replace(max(gone) if generation % 2 else rng.choice(sorted(gone)))
        rng.shuffle(order)
        for rank in order:
            group.domains[rank].install(generation)
        assert all((a == b).all() for a, b in zip(arrays, before, strict=True))
        check(group)
    for (rank, other), inode in inodes.items():
        if rank not in gone and other not in gone:
            assert inode_of(group.planes[rank], other) == inode
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_members_install_at_different_times(kind: str) -> None:
    """One member is already in the new generation and sends while others have not even been poisoned."""
    group = Group(3, KINDS[kind], protected=True)
    for generation in range(1, 40):
        big = [np.ones(300_000, np.float32) for _ in range(3)]
        old = [(r, group.planes[r].submit(all_reduce(big[r]))) for r in (1, 2)]
        group.domains[0].install(generation)
        new = [np.full(200_000, r + 1, np.float32) for r in range(3)]
        tickets = {0: group.planes[0].submit(all_reduce(new[0]))}
        for rank in (1, 2):
            group.domains[rank].install(generation)
            tickets[rank] = group.planes[rank].submit(all_reduce(new[rank]))
        for rank, ticket in old:
            assert group.planes[rank].wait(ticket, LIMIT_S) is Status.ABORTED
            group.planes[rank].release(ticket)
        for rank, ticket in tickets.items():
            assert group.planes[rank].wait(ticket, LIMIT_S) is Status.DONE
            group.planes[rank].release(ticket)
        assert all((a == 6).all() for a in new)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_point_to_point_is_aborted_in_mid_message(kind: str) -> None:
    rng = random.Random(kind)
    group = Group(3, KINDS[kind], lane=Lane.P2P, protected=True)
    for generation in range(1, 60):
        buffers, tickets = [], []
        for _ in range(rng.randrange(1, 12)):
            a, b = rng.sample(range(3), 2)
            count = rng.choice([0, 1, 5_000, 3_000_000])
            data = np.ones(count, np.uint8)
            buffers.append(data)
            if rng.random() < 0.5:
                call = Call(Op.SEND, peer=b, tag=rng.randrange(3), inputs=[span(data)])
                tickets.append((a, group.planes[a].submit(call)))
            else:
                peer = rng.choice([-1, b])
                call = Call(Op.RECV, peer=peer, tag=rng.randrange(3), outputs=[span(data)])
                tickets.append((a, group.planes[a].submit(call)))
        spin(rng)
        for domain in group.domains:
            domain.poison()
        for rank, ticket in tickets:
            group.planes[rank].wait(ticket, LIMIT_S)
            assert group.planes[rank].done(ticket)
            group.planes[rank].release(ticket)
        for domain in group.domains:
            domain.install(generation)
        sent, got = np.arange(700_001, dtype=np.uint32), np.zeros(700_001, np.uint32)
        first = group.planes[1].submit(Call(Op.RECV, peer=-1, tag=9, outputs=[span(got)]))
        second = group.planes[2].submit(Call(Op.SEND, peer=1, tag=9, inputs=[span(sent)]))
        assert group.planes[1].wait(first, LIMIT_S) is Status.DONE
        assert group.planes[2].wait(second, LIMIT_S) is Status.DONE
        assert group.planes[1].source(first) == 2
        assert np.array_equal(sent, got)
        group.planes[1].release(first)
        group.planes[2].release(second)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_dead_link_poisons_a_protected_domain_first(kind: str) -> None:
    group = Group(3, KINDS[kind], protected=True)
    arrays = [np.ones(2_000_000, np.float32) for _ in range(3)]
    tickets = [group.planes[r].submit(all_reduce(arrays[r])) for r in (0, 1)]
    group.domains[2].close()
    for rank, ticket in enumerate(tickets):
        if group.planes[rank].wait(ticket, 1.0) is Status.PENDING:
            group.domains[rank].poison()
        assert group.planes[rank].wait(ticket, LIMIT_S) is Status.ABORTED
        assert group.domains[rank].poisoned
    assert any((group.planes[r], 2) in group.domains[r].lost() for r in (0, 1))
    for r in (0, 1):
        if group.domains[r].lost():
            assert select.select([group.domains[r].failure_fd], [], [], 0)[0]
            group.domains[r].install(1)
            assert not group.domains[r].lost()
            assert not select.select([group.domains[r].failure_fd], [], [], 0)[0]
    group.close()


def test_poison_from_many_threads_at_once() -> None:
    group = Group(2, KINDS["mixed"], protected=True)
    for generation in range(1, 30):
        array = np.ones(100_000, np.float32)
        ticket = group.planes[0].submit(all_reduce(array))
        threads = [threading.Thread(target=group.domains[0].poison) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert group.planes[0].wait(ticket, LIMIT_S) is Status.ABORTED
        group.planes[0].release(ticket)
        group.domains[0].install(generation)
        group.domains[1].install(generation)
    check(group)
    group.close()


def test_a_call_waits_for_a_link_that_comes_later() -> None:
    group = Group(2, lambda a, b: "shm")
    group.planes[0].unlink(1)
    group.planes[1].unlink(0)
    arrays = [np.ones(50_000, np.float32) for _ in range(2)]
    tickets = group.submit([all_reduce(a) for a in arrays])
    assert group.planes[0].wait(tickets[0], 0.01) is Status.PENDING
    link(group.planes[0], group.planes[1], "tcp")
    assert group.wait(tickets) == [Status.DONE] * 2
    assert (arrays[0] == 2).all()
    group.close()


def test_inline_calls_are_aborted_too() -> None:
    group = Group(2, KINDS["shm"], protected=True)
    array = np.ones(10, np.float32)
    call = Call(Op.ALL_REDUCE, Element.FLOAT32, inputs=[span(array)], outputs=[span(array)], inline=True)
    ticket = group.planes[0].submit(call)
    seen: list[Status] = []
    thread = threading.Thread(target=lambda: seen.append(group.planes[0].wait(ticket)))
    thread.start()
    assert group.planes[0].wait(ticket, 0.02) is Status.PENDING
    group.domains[0].poison()
    thread.join()
    assert seen == [Status.ABORTED]
    group.close()
