"""A connection to another member: by Unix socket on one node, else by TCP.

Switches send a connection one of several ways by its ports, and a way may swallow what it is given. So nobody waits
long for an answer over one: after a second the next try leaves from another port, and so, by chance, another way.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket

from keepstep.errors import GroupAborted, PeerLost
from keepstep.records.messages import Address

__all__ = ["connect_address"]

_log = logging.getLogger("keepstep")
_FIRST_TRY_S, _LONGEST_TRY_S = 1.0, 8.0
_PLANNED_S = 5.0


def connect_address(
    own: Address, other: Address, *, timeout_s: float, ports: tuple[int, ...] = (), interrupt_fd: int = -1
) -> socket.socket:
    """A connection to `other`: by Unix socket on the same node, else by TCP. For the first five seconds it leaves from
    those of `ports` that are free, if any are, then from any. Raises PeerLost, and GroupAborted when `interrupt_fd`
    becomes readable while nobody answers."""
    try:
        if own.node == other.node:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect("\0" + other.local)
            except OSError:
                sock.close()
                raise
            return sock
        sock = _connect(own, other, ports=ports, timeout_s=timeout_s, interrupt_fd=interrupt_fd)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        where = f"{other.member} on {other.node}"
        raise PeerLost(f"cannot connect to {where}: {error.strerror or error}", where=where) from error


def _connect(
    own: Address, other: Address, *, ports: tuple[int, ...], timeout_s: float, interrupt_fd: int
) -> socket.socket:
    """TCP in several tries, each over another port than the one before and up to twice as long."""
    left, lasts = timeout_s, _FIRST_TRY_S
    while True:
        seconds = min(lasts, left)
        try:
            return _connect_from(own, other, ports=ports, timeout_s=seconds, interrupt_fd=interrupt_fd)
        except TimeoutError:
            left -= seconds
            if left <= 0:
                raise
        lasts = min(2 * lasts, _LONGEST_TRY_S)
        if timeout_s - left < _PLANNED_S:
            ports = ports[1:] + ports[:1]
        elif ports:
            _log.warning("nothing answers from the source ports planned for %s; any is taken", other.member)
            ports = ()


def _connect_from(
    own: Address, other: Address, *, ports: tuple[int, ...], timeout_s: float, interrupt_fd: int
) -> socket.socket:
    """One try, from the first of `ports` that can be had (one that was just in use cannot), else from any."""
    for port in ports:
        try:
            return _try(other, source=(own.host, port), timeout_s=timeout_s, interrupt_fd=interrupt_fd)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    if ports:
        _log.warning("none of the %d source ports planned for %s is free; any is taken", len(ports), other.member)
    return _try(other, source=None, timeout_s=timeout_s, interrupt_fd=interrupt_fd)


def _try(other: Address, *, source: tuple[str, int] | None, timeout_s: float, interrupt_fd: int) -> socket.socket:
    """As `socket.create_connection`, but cut short when `interrupt_fd` becomes readable."""
    trouble = OSError(f"{other.host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(other.host, other.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            if source is not None:
                sock.bind(source)
            sock.setblocking(False)
            _reach(sock, sock.connect_ex(address), timeout_s=timeout_s, interrupt_fd=interrupt_fd)
        except OSError as error:
            sock.close()
            trouble = error
        except GroupAborted:
            sock.close()
            raise
        else:
            return sock
    raise trouble


def _reach(sock: socket.socket, code: int, *, timeout_s: float, interrupt_fd: int) -> None:
    """Wait until a connection that was begun with `code` stands. Raises OSError, GroupAborted."""
    if code == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        if interrupt_fd >= 0:
            poll.register(interrupt_fd, select.POLLIN)
        ready = dict(poll.poll(max(1, int(timeout_s * 1000))))
        if interrupt_fd in ready:
            raise GroupAborted("the call was interrupted by an abort")
        if not ready:
            raise TimeoutError("timed out")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
