"""Where a member's data plane is reached."""

from __future__ import annotations

import msgspec

__all__ = ["Address"]


class Address(msgspec.Struct, frozen=True):
    """Where the data plane of one member is reached.

    `member` is the unique name of the process, `node` the name of its host; members with equal nodes share memory.
    `local` is an abstract Unix socket name, `host` and `port` the TCP listener.
    """

    member: str
    node: str
    local: str
    host: str
    port: int
