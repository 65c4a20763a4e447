"""State moves in checked chunks from all sources (G-13): one that differs or dies is named, the others do its part."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from keepstep.training.chunkqueue import ChunkQueue
from keepstep.training.manifest import Chunk, Image
from keepstep.training.state import TrackedState
from keepstep.training.statewire import Ask, Status, ask, receive_exactly, receive_header, set_timeout
from keepstep.training.transfer import SourcesLost, StateServer, fetch

Handler = Callable[[socket.socket], None]


def member(seed: int, *, steps: int = 2, width: int = 400) -> tuple[nn.Module, TrackedState]:
    """A model of several chunks and an optimizer with state."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.Linear(2 * width, width))
    optimizer = torch.optim.AdamW(net.parameters())
    state = TrackedState(net, optimizer, schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for number in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, state


@contextmanager
def connected(handlers: dict[int, Handler]) -> Iterator[dict[int, socket.socket]]:
    """A socket to each handler, which runs in a thread."""
    with ExitStack() as stack:
        ends = {}
        for rank, handler in handlers.items():
            mine, theirs = socket.socketpair()
            thread = threading.Thread(target=handler, args=(theirs,))
            thread.start()
            stack.callback(thread.join)
            ends[rank] = stack.enter_context(mine)
        yield ends


def serve(image: Image | None) -> Handler:
    """A source that holds `image`."""
    return StateServer(lambda: image).handle


def patient(image: Image, requests: int, event: threading.Event) -> Handler:
    """A source that answers some requests at once and the others after `event`, so that others come first."""
    left = requests

    def provider() -> Image:
        nonlocal left
        left -= 1
        if left < 0:
            event.wait()
        return image

    return StateServer(provider).handle


def dies_after(image: Image, requests: int, event: threading.Event) -> Handler:
    """A source that is gone after some requests, in the middle of an answer; then `event` is set."""

    def handle(sock: socket.socket) -> None:
        left = requests

        def provider() -> Image | None:
            nonlocal left
            left -= 1
            if left < 0:
                sock.send(struct.pack("<4sIQ", b"KSTR", 0, image.manifest.nbytes))
                sock.shutdown(socket.SHUT_RDWR)
                event.set()
            return image

        StateServer(provider).handle(sock)

    return handle


def changing(image: Image, requests: int, event: threading.Event) -> Handler:
    """A source whose state moves on while it serves; then `event` is set."""
    assert image.digest
    left = requests

    def provider() -> Image:
        nonlocal left
        left -= 1
        if left == 0:
            for buffer in image.buffers:
                buffer[:] = bytes(len(buffer))
            event.set()
        return image

    return StateServer(provider).handle


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_sources_work_and_the_result_is_equal(count: int) -> None:
    (_, source), (_, joiner) = member(1), member(2, steps=0)
    image = source.image()
    with connected({rank: serve(image) for rank in range(count)}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner)
    assert joiner.digest() == image.digest
    assert transfer.bytes_moved == image.manifest.nbytes == sum(transfer.by_source.values())
    assert transfer.lost == () and transfer.diverged == ()
    assert not joiner.taking


def test_a_source_that_differs_is_named_and_not_used() -> None:
    (_, source), (other_net, other), (_, joiner) = member(1), member(1), member(2)
    other_net[2].bias.data.view(torch.int32)[3] ^= 1
    image = source.image()
    with connected({0: serve(other.image()), 1: serve(image), 2: serve(image)}) as sockets:
        transfer = fetch(sockets, "", state=joiner)
    assert [(one.rank, one.entry) for one in transfer.diverged] == [(0, "parameters.model.2.bias")]
    assert 0 not in transfer.by_source and joiner.digest() == image.digest


def test_a_difference_outside_of_tensors_is_named() -> None:
    (_, source), (_, other), (_, joiner) = member(1), member(1), member(2)
    other.optimizers["optimizer"].param_groups[0]["lr"] *= 2
    image = source.image()
    with connected({0: serve(image), 1: serve(other.image())}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner)
    assert [one.entry for one in transfer.diverged] == ["optimizers.optimizer.groups[0].lr"]


@pytest.mark.parametrize("requests", [0, 1, 2, 3])
def test_a_source_that_dies_is_replaced_by_the_others(requests: int) -> None:
    (_, source), (_, joiner) = member(1), member(2)
    image = source.image()
    dead = threading.Event()
    with connected({0: dies_after(image, requests, dead), 1: patient(image, 1, dead)}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner)
    assert transfer.lost == (0,)
    assert joiner.digest() == image.digest


def test_a_source_that_sends_wrong_bytes_is_left_out() -> None:
    (_, source), (_, moving), (_, joiner) = member(1), member(1), member(2)
    image = source.image()
    changed = threading.Event()
    with connected({0: patient(image, 2, changed), 1: changing(moving.image(), 2, changed)}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner)
    assert [one.rank for one in transfer.diverged] == [1]
    assert joiner.digest() == image.digest


def test_a_source_that_does_not_stand_still_or_says_nothing_is_lost() -> None:
    (_, source), (_, joiner) = member(1), member(2)
    image = source.image()
    silent = threading.Event()

    def handle(sock: socket.socket) -> None:
        with sock:
            silent.wait()

    with connected({0: serve(None), 1: serve(image), 2: handle}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner, timeout_s=0.05)
        silent.set()
    assert transfer.lost == (0, 2)
    assert joiner.digest() == image.digest


def test_no_source_left_names_all_and_a_second_try_keeps_what_arrived() -> None:
    (_, source), (_, joiner) = member(1), member(2)
    image = source.image()
    with connected({4: dies_after(image, 4, threading.Event())}) as sockets, pytest.raises(SourcesLost) as caught:
        fetch(sockets, image.digest, state=joiner)
    assert caught.value.lost == (4,) and "[4]" in str(caught.value)
    assert joiner.taking
    with connected({5: serve(image)}) as sockets:
        transfer = fetch(sockets, image.digest, state=joiner)
    assert 0 < transfer.bytes_moved < image.manifest.nbytes
    assert joiner.digest() == image.digest


def test_nobody_holds_what_is_expected() -> None:
    (_, source), (_, joiner) = member(1), member(2)
    before = joiner.digest()
    with connected({0: serve(source.image())}) as sockets, pytest.raises(SourcesLost) as caught:
        fetch(sockets, "00" * 16, state=joiner)
    assert [one.rank for one in caught.value.diverged] == [0]
    assert joiner.digest() == before


@pytest.mark.parametrize(
    ("kind", "first", "count"), [(9, 0, 0), (Ask.CHUNKS, 0, 0), (Ask.CHUNKS, 0, 5000), (Ask.CHUNKS, 2**32 - 1, 2)]
)
def test_requests_out_of_bounds_are_refused(kind: int, first: int, count: int) -> None:
    """G-17."""
    image = member(1, steps=0)[1].image()
    with connected({0: serve(image)}) as sockets:
        ask(sockets[0], kind, first=first, count=count)  # type: ignore[arg-type]
        assert receive_header(sockets[0]) == (Status.REFUSED, 0)
        ask(sockets[0], Ask.DIGEST)
        assert receive_header(sockets[0]) == (Status.OK, 32)
        assert receive_exactly(sockets[0], 32).decode() == image.digest
        sockets[0].sendall(b"GET / HTTP/1.1\r\n")
        assert sockets[0].recv(1) == b""


def test_a_client_may_take_its_time_before_it_asks() -> None:
    """A joiner connects when a move is prepared, and asks after its commit."""
    _, source = member(1)
    image = source.image()
    ours, theirs = socket.socketpair()
    set_timeout(theirs, 0.001)  # as it may come from whoever let it in
    served = threading.Thread(target=StateServer(lambda: image).handle, args=(theirs,))
    served.start()
    with ours:
        ask(ours, Ask.DIGEST)
        assert receive_header(ours) == (Status.OK, len(image.digest))
        assert bytes(receive_exactly(ours, len(image.digest))).decode() == image.digest
        size = struct.calcsize("@ll")
        limits = [theirs.getsockopt(socket.SOL_SOCKET, one, size) for one in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)]
    served.join()
    assert [limit == bytes(size) for limit in limits] == [True, False]


def test_a_queue_leaves_out_what_is_there() -> None:
    chunks = [Chunk(0, 0, 10)] * 5 + [Chunk(1, 0, 1 << 20)] * 3
    queue = ChunkQueue(chunks, {2, 7})
    taken = []
    while (unit := queue.take(block=False)) is not None:
        taken.append(unit)
    assert [number for unit in taken for number in range(unit.first, unit.first + unit.count)] == [0, 1, 3, 4, 5, 6]
    queue.back(taken[1:])
    queue.done()
    assert queue.missing == len(taken) - 1
    assert queue.take(block=True) == taken[1]
