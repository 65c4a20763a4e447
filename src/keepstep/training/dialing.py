"""Making one link: the dialer's half, with shared memory where both members are on one node."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from keepstep.errors import HelloCut, MembershipError, PeerLost, TransportError
from keepstep.records.messages import Address
from keepstep.training.authentication import Greeting, Verdict, greet
from keepstep.training.connecting import connect_address
from keepstep.training.plane import shared_link_bytes
from keepstep.training.spares import Arrived, LinkKey

__all__ = ["Errand", "Identity", "again", "dial_link", "dial_member"]

_CALLS = 3
_Made = TypeVar("_Made")


class Identity(NamedTuple):
    """Who this member is on the wire."""

    address: Address
    rank: int
    secret: bytes


class Errand(NamedTuple):
    """What a call is for: the `kind` of its greeting, the generation it belongs to, the source ports it may leave from
    (empty: any), how long it may take, and the descriptor that cuts it short when it becomes readable (-1: none)."""

    kind: str
    generation: int
    ports: tuple[int, ...]
    timeout_s: float
    interrupt_fd: int


def dial_link(own: Identity, address: Address, *, key: LinkKey, errand: Errand) -> Arrived | None:
    """The connection for link `key` to the member at `address`; None where that member is dialling it itself.

    Raises PeerLost, Fenced, GroupAborted, OSError.
    """
    return again(lambda: _dial_once(own, address, key=key, errand=errand))


def again(call: Callable[[], _Made]) -> _Made:
    """The result of `call`, made up to three times where the other side hangs up in the middle of the hello: a busy
    member drops a caller that waits for long, and that is no loss."""
    for _ in range(_CALLS - 1):
        try:
            return call()
        except HelloCut:
            continue
    return call()


def _dial_once(own: Identity, address: Address, *, key: LinkKey, errand: Errand) -> Arrived | None:
    sock = _connected(own, address, errand=errand)
    shared = sock.family == socket.AF_UNIX
    memory_fd = -1
    verdict = None
    try:
        if shared:
            memory_fd = os.memfd_create("keepstep-link", os.MFD_CLOEXEC)
            os.ftruncate(memory_fd, shared_link_bytes())
        greeting = Greeting(
            errand.kind,
            own.address.member,
            own.rank,
            address.member,
            errand.generation,
            key.group,
            key.lane,
            shared,
        )
        verdict = greet(
            sock,
            greeting,
            secret=own.secret,
            timeout_s=errand.timeout_s,
            interrupt_fd=errand.interrupt_fd,
            memory_fd=memory_fd,
        )
    finally:
        if verdict != Verdict.WELCOME:
            Arrived(sock, memory_fd).discard()
    return Arrived(sock, memory_fd) if verdict == Verdict.WELCOME else None


def _connected(own: Identity, address: Address, *, errand: Errand) -> socket.socket:
    return connect_address(
        own.address, address, timeout_s=errand.timeout_s, ports=errand.ports, interrupt_fd=errand.interrupt_fd
    )


def dial_member(own: Identity, address: Address, *, errand: Errand) -> socket.socket:
    """A connection of the errand's kind to the member at `address`, which must serve it. Raises PeerLost or Fenced."""
    return again(lambda: _dial_member_once(own, address, errand=errand))


def _dial_member_once(own: Identity, address: Address, *, errand: Errand) -> socket.socket:
    sock = _connected(own, address, errand=errand)
    greeting = Greeting(errand.kind, own.address.member, own.rank, address.member, errand.generation)
    try:
        verdict = greet(sock, greeting, secret=own.secret, timeout_s=errand.timeout_s, interrupt_fd=errand.interrupt_fd)
        if verdict != Verdict.WELCOME:
            raise PeerLost(f"{address.member} did not take the connection", where=address.node)
    except (TransportError, MembershipError, OSError) as error:
        sock.close()
        if isinstance(error, OSError):
            raise PeerLost(f"{address.member} hung up: {error.strerror}", where=address.node) from error
        raise
    return sock
