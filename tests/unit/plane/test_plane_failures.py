"""Failures outside a protected domain: every member learns at once, and the message names who and what."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import numpy as np
import pytest
from plane_rig import KINDS, Group, all_reduce, span, spans

from keepstep.errors import TransportError, UsageError
from keepstep.training.plane import Call, Element, Lane, Op, Plane, Reduction, Status

LIMIT_S = 20.0


def fail_all(group: Group, tickets: list[int]) -> list[str]:
    """All tickets fail; returns what each says."""
    assert group.wait(tickets, LIMIT_S) == [Status.FAILED] * len(tickets)
    return [plane.failure(ticket).what for plane, ticket in zip(group.planes, tickets, strict=True)]


def root_call(rank: int, array: np.ndarray, root: int) -> Call:
    call = Call(Op.BROADCAST, root=root)
    call.inputs, call.outputs = ([span(array)], ()) if rank == root else ((), [span(array)])
    return call


@pytest.mark.parametrize("kind", ["shm", "tcp", "mixed"])
def test_another_op_is_named(kind: str) -> None:
    group = Group(3, KINDS[kind])
    small, large = [np.zeros(1, np.int64) for _ in range(3)], np.zeros(1024, np.float32)
    calls = [root_call(r, small[r], 2) for r in range(2)] + [all_reduce(large)]
    whats = fail_all(group, group.submit(calls))
    everything = " | ".join(whats)
    assert "broadcast of 8 bytes" in everything
    assert "all_reduce of 4096 bytes (float32 sum)" in everything
    late = group.planes[0].submit(Call(Op.BARRIER))
    assert group.planes[0].wait(late, LIMIT_S) is Status.FAILED
    assert group.planes[0].failure(late).what == whats[0]
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("counts", [(4, 4, 5), (4, 200_000, 4), (300_000, 300_000, 300_001)])
def test_another_size_is_named(kind: str, counts: tuple[int, int, int]) -> None:
    group = Group(3, KINDS[kind])
    arrays = [np.zeros(n, np.float32) for n in counts]
    everything = " | ".join(fail_all(group, group.submit([all_reduce(a) for a in arrays])))
    assert f"{4 * max(counts)} bytes" in everything
    assert f"{4 * min(counts)} bytes" in everything
    group.close()


def test_another_element_or_reduction_is_named() -> None:
    group = Group(2, KINDS["shm"])
    arrays = [np.zeros(8, np.float32) for _ in range(2)]
    calls = [all_reduce(arrays[0]), all_reduce(arrays[1], element=Element.INT32, how=Reduction.MAX)]
    everything = " | ".join(fail_all(group, group.submit(calls)))
    assert "int32 max" in everything
    assert "float32 sum" in everything
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_two_roots_that_wait_for_each_other(kind: str) -> None:
    group = Group(2, KINDS[kind])
    arrays = [np.zeros(8, np.uint8) for _ in range(2)]
    calls = [root_call(r, arrays[r], 1 - r) for r in range(2)]
    everything = " | ".join(fail_all(group, group.submit(calls)))
    assert "with root 0" in everything
    assert "with root 1" in everything
    group.close()


def test_split_sizes_that_disagree() -> None:
    group = Group(2, KINDS["mixed"])
    sent = [[np.zeros(n, np.uint8) for n in (3, 4)], [np.zeros(n, np.uint8) for n in (5, 6)]]
    got = [[np.zeros(n, np.uint8) for n in (3, 9)], [np.zeros(n, np.uint8) for n in (4, 6)]]
    calls = [Call(Op.ALL_TO_ALL, inputs=spans(sent[r]), outputs=spans(got[r])) for r in range(2)]
    tickets = group.submit(calls)
    assert group.planes[0].wait(tickets[0], LIMIT_S) is Status.FAILED
    everything = group.planes[0].failure(tickets[0]).what
    assert "message of 5 bytes in all_to_all, 9 expected" in everything
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_time_out_names_who_has_not_delivered(kind: str) -> None:
    group = Group(4, KINDS[kind])
    arrays = [np.zeros(100_000, np.float32) for _ in range(4)]
    calls = [all_reduce(a) for a in arrays]
    for call in calls:
        call.timeout_s = 0.1
    tickets = [group.planes[r].submit(calls[r]) for r in (0, 1, 3)]
    failures = []
    for rank, ticket in zip((0, 1, 3), tickets, strict=True):
        assert group.planes[rank].wait(ticket, LIMIT_S) is Status.FAILED
        failures.append(group.planes[rank].failure(ticket))
    assert failures[2].peer == 2
    assert "rank 2" in failures[2].what
    assert any("has not delivered within 0.1 s: all_reduce of 400000 bytes" in f.what for f in failures)
    group.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_missing_link_is_named(kind: str) -> None:
    group = Group(2, KINDS[kind])
    group.planes[0].unlink(1)
    call = Call(Op.BARRIER, timeout_s=0.05)
    ticket = group.planes[0].submit(call)
    assert group.planes[0].wait(ticket, LIMIT_S) is Status.FAILED
    assert "rank 1 has not connected" in group.planes[0].failure(ticket).what
    group.close()


def forked(group: Group, rank: int, work: Callable[[Plane], None]) -> int:
    """Runs `work` as member `rank` in a child process; this process gives up its copy of that member's links."""
    child = os.fork()
    if child == 0:
        try:
            for other, plane in enumerate(group.planes):
                if other != rank:
                    for peer in plane.linked():
                        os.close(plane._c.ks_link_fd(plane._handle, peer))
            work(group.planes[rank])
        finally:
            os._exit(0)
    for peer in group.planes[rank].linked():
        os.close(group.planes[rank]._c.ks_link_fd(group.planes[rank]._handle, peer))
    return child


def hang(plane: Plane) -> None:
    signal.pause()


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_killed_process_is_noticed_at_once(kind: str, protected: bool) -> None:
    group = Group(2, KINDS[kind], protected=protected)
    child = forked(group, 1, hang)
    array = np.ones(1_000_000, np.float32)
    ticket = group.planes[0].submit(all_reduce(array))
    assert group.planes[0].wait(ticket, 0.05) is Status.PENDING
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    status = group.planes[0].wait(ticket, LIMIT_S)
    if protected:
        assert status is Status.ABORTED
        assert group.domains[0].poisoned
    else:
        assert status is Status.FAILED
        assert group.planes[0].failure(ticket).peer == 1
        assert "rank 1" in group.planes[0].failure(ticket).what
    assert group.domains[0].lost() == {(group.planes[0], 1)}
    group.planes[0].close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_orderly_end_of_one_member_is_no_failure_for_a_finished_call(kind: str) -> None:
    """The first to finish may leave; the data it sent still arrives."""
    for nbytes in (8, 300_000, 4_000_000):
        group = Group(3, KINDS[kind], protected=True)
        arrays = [np.full(nbytes // 4, r, np.float32) for r in range(3)]
        tickets = group.submit([root_call(r, arrays[r], 0) for r in range(3)])
        for rank in range(3):
            assert group.planes[rank].wait(tickets[rank], LIMIT_S) is Status.DONE
            group.domains[rank].close()
        assert all((a == 0).all() for a in arrays)
        assert not any(domain.lost() for domain in group.domains)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_any_source_outlives_an_orderly_leaver_but_not_a_death(kind: str) -> None:
    group = Group(3, KINDS[kind], lane=Lane.P2P)
    out, data = np.zeros(5, np.uint8), np.ones(5, np.uint8)
    ticket = group.planes[0].submit(Call(Op.RECV, peer=-1, outputs=[span(out)]))
    group.domains[1].close()
    assert group.planes[0].wait(ticket, 0.05) is Status.PENDING
    group.planes[2].submit(Call(Op.SEND, peer=0, inputs=[span(data)]))
    assert group.planes[0].wait(ticket, LIMIT_S) is Status.DONE
    again = group.planes[0].submit(Call(Op.RECV, peer=1, outputs=[span(out)]))
    assert group.planes[0].wait(again, LIMIT_S) is Status.FAILED
    assert group.planes[0].failure(again).peer == 1
    group.close()


def test_wrong_calls_are_refused_at_submit() -> None:
    group = Group(2, KINDS["shm"])
    data = np.zeros(6, np.uint8)
    plane = group.planes[0]
    bad = [
        Call(Op.ALL_REDUCE, Element.FLOAT32, inputs=[span(data)], outputs=[span(data)]),
        Call(Op.ALL_REDUCE, inputs=[span(data)], outputs=[]),
        Call(Op.BROADCAST, root=2, inputs=[span(data)]),
        Call(Op.ALL_GATHER, inputs=[span(data)], outputs=[span(data)]),
        Call(Op.SEND, peer=1, inputs=[span(data)]),
        Call(Op.ALL_REDUCE, Element.FLOAT32, inputs=[(0, 8)], outputs=[(0, 8)]),
    ]
    for call in bad:
        with pytest.raises(UsageError):
            plane.submit(call)
    with pytest.raises(TransportError, match="does not exist"):
        plane.wait(77)
    with pytest.raises(UsageError, match="cannot link rank 1"):
        plane.link_tcp(1, socket.socketpair()[0])
    group.close()
    with pytest.raises(TransportError, match="closed"):
        plane.submit(Call(Op.BARRIER))


def test_many_planes_start_no_thread_before_their_first_call() -> None:
    group = Group(2, KINDS["shm"])
    before = len(os.listdir("/proc/self/task"))
    planes = [
        Plane(group.domains[0], 0, size=2, lane=Lane(i % 2), group=f"g{i}", global_ranks=(0, 1)) for i in range(40)
    ]
    assert len(os.listdir("/proc/self/task")) == before
    for plane in planes:
        plane.close()
    group.close()
