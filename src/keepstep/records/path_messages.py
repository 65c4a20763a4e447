"""What the controller and agents say to each other about paths: which switch a connection passes after some hops, and
how fast its bytes arrive."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_WAYS", "Carried", "CountPaths", "PathsCounted", "PathsProbed", "ProbePaths", "Way"]

MAX_WAYS = 8192
"""Most connections that one order asks about."""


class Way(msgspec.Struct, frozen=True, array_like=True):
    """One direction of a TCP connection, as switches see it: addresses and ports."""

    source: str
    source_port: int
    destination: str
    port: int


class PathsProbed(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """An agent's answer to `ProbePaths` `number`: for each way, in order, the switch that answered at each `ttl` ("":
    none did). `why` says why nothing could be asked. Not kept in the journal."""

    number: int
    hops: tuple[tuple[str, ...], ...] = ()
    why: str = ""


class ProbePaths(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """To an agent: where are packets of these ways after so many hops? Answer: `PathsProbed`."""

    epoch: int
    number: int
    ways: tuple[Way, ...]
    ttls: tuple[int, ...] = (2,)


class Carried(msgspec.Struct, frozen=True, array_like=True):
    """What one direction of a connection has carried since it began, by the kernel of its sender: bytes that the other
    end acknowledged, and the time in us in which there was something to send and the receiver had room for it."""

    nbytes: int = 0
    busy_us: int = 0


class PathsCounted(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """An agent's answer to `CountPaths` `number`: one for each way, in order; zeros: no such connection. Not kept in
    the journal."""

    number: int
    carried: tuple[Carried, ...] = ()


class CountPaths(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """To an agent: what have the connections of these ways carried? Answer: `PathsCounted`."""

    epoch: int
    number: int
    ways: tuple[Way, ...]
