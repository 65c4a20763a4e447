"""A joiner and its sources: those that do not answer hold nothing up while others do."""

from __future__ import annotations

import socket
import threading

from keepstep.errors import PeerLost
from keepstep.records.messages import Address, Fetch
from keepstep.training.handover import Handover


class Sources:
    """In the place of a fabric: rank 0 is gone, rank 1 answers once `late` is set, all others at once."""

    generation = 1

    def __init__(self) -> None:
        self.late = threading.Event()
        self.others: list[socket.socket] = []

    def serve(self, kind: str, handler: object) -> None:
        assert kind == "state" and handler

    def dial(self, address: Address, kind: str, *, timeout_s: float, generation: int) -> socket.socket:
        if address.member == "m0":
            raise PeerLost("nobody answers")
        if address.member == "m1":
            assert self.late.wait(60)
        here, there = socket.socketpair()
        self.others.append(there)
        return here


def order(*ranks: int) -> Fetch:
    roster = {rank: Address(f"m{rank}", f"n{rank}", "", "127.0.0.1", 1) for rank in ranks}
    return Fetch(1, 1, 7, "digest", ranks, roster, b"")


def test_sources_that_answer_do_not_wait_for_those_that_do_not() -> None:
    sources = Sources()
    handover = Handover(sources, None)  # type: ignore[arg-type]
    found = handover._dial(order(0, 1, 2, 3))
    assert sorted(found) == [2, 3]
    for sock in found.values():
        sock.close()
    (call,) = [thread for thread in threading.enumerate() if thread.name == "state-1"]
    sources.late.set()
    call.join(30)
    assert len(sources.others) == 3
    for other in sources.others:
        assert other.recv(1) == b"", "the call that came too late is hung up, too"
        other.close()


def test_one_source_alone_is_waited_for_and_none_is_no_wait() -> None:
    sources = Sources()
    handover = Handover(sources, None)  # type: ignore[arg-type]
    threading.Timer(0.1, sources.late.set).start()
    (sock,) = handover._dial(order(1)).values()
    assert handover._dial(order(0)) == handover._dial(order()) == {}
    sock.close()
    sources.others[0].close()
