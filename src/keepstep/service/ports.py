"""Free TCP ports for rendezvous: found by asking the kernel, given away at once."""

from __future__ import annotations

import socket

from keepstep.errors import EnvironmentProblem

__all__ = ["free_port", "free_ports"]


def free_ports(count: int) -> tuple[int, ...]:
    """`count` different TCP ports that nobody listens on now. Raises EnvironmentProblem if the kernel has none."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(probe)
            probe.bind(("", 0))
        return tuple(probe.getsockname()[1] for probe in sockets)
    except OSError as error:
        raise EnvironmentProblem(f"no free TCP port: {error.strerror}", remedy="see `keepstep doctor`") from error
    finally:
        for probe in sockets:
            probe.close()


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
