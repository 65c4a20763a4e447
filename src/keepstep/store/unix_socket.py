"""Abstract-namespace SOCK_SEQPACKET sockets: names, listening, connecting, and who the other side is."""

from __future__ import annotations

import errno
import os
import socket
import struct

from keepstep.errors import EnvironmentProblem, UsageError

__all__ = ["connect_unix", "listen_unix", "peer_pid", "socket_address"]

_CREDENTIALS = struct.Struct("3i")
_MAX_NAME_BYTES = 107


def socket_address(name: str) -> str:
    """The abstract socket address of `name`. Raises UsageError for a name that cannot be one."""
    if not name or "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
        raise UsageError(
            f"{name[:40]!r} cannot be a local socket name", remedy=f"1 to {_MAX_NAME_BYTES} bytes, no zero byte"
        )
    return "\0" + name


def listen_unix(name: str) -> socket.socket:
    """A listening, non-blocking socket of that name. Raises EnvironmentProblem if the name is in use."""
    address = socket_address(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise EnvironmentProblem(
                "another process listens on this local socket name", where=name, remedy="use another run directory"
            ) from error
        raise EnvironmentProblem(f"cannot listen on a local socket: {error.strerror}", where=name) from error
    listener.setblocking(False)
    return listener


def connect_unix(name: str, *, timeout_s: float) -> socket.socket:
    """A blocking socket connected to `name` and owned by the same user at the other end.

    Raises EnvironmentProblem if nobody answers within `timeout_s` seconds or another user does.
    """
    address = socket_address(name)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(timeout_s)
        link.connect(address)
        link.settimeout(None)
        peer_pid(link)
    except OSError as error:
        link.close()
        raise EnvironmentProblem(
            f"no agent answers: {error.strerror or error}",
            where=name,
            remedy="start the script with `keepstep run`, or unset KEEPSTEP_AGENT",
        ) from error
    except EnvironmentProblem:
        link.close()
        raise
    return link


def peer_pid(link: socket.socket, *, owner: int | None = None) -> int:
    """The process at the other end when it connected.

    Raises EnvironmentProblem if it does not belong to user `owner` (None: ours).
    """
    expected = os.getuid() if owner is None else owner
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != expected:
        raise EnvironmentProblem(
            f"the process at the other end belongs to user {uid}, not {expected}",
            remedy="run agent and members as one user",
        )
    return int(pid)
