"""A port where nobody answers, as over a way that swallows what it is given."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["silent_port"]


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """The only place in the listener's queue is taken, and whoever comes next is not answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        with socket.create_connection(listener.getsockname()):
            yield listener.getsockname()[1]
