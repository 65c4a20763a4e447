"""What the conductor of a job's traffic is told, and what it wants done."""

from __future__ import annotations

import msgspec

from keepstep.records.path_messages import Way
from keepstep.records.plan import Route

__all__ = [
    "Action",
    "AskCounts",
    "AskHops",
    "ConductorSettings",
    "GivePaths",
    "Place",
    "Renew",
    "Seen",
    "Tell",
]


class ConductorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`hops` names the switches by the address they answer from. `ports` are the source ports that may be used. A flow
    under `least_bytes` a step is left to chance. With `act` false plans are only told."""

    hops: dict[str, str]
    ports: tuple[int, ...]
    ttl: int = 2
    least_bytes: float = 65536.0
    act: bool = True


class Place(msgspec.Struct, frozen=True):
    """Where a rank is reached: its node in the topology, address and listening port."""

    node: str
    host: str
    port: int


class Seen(msgspec.Struct, frozen=True):
    """What `rank` sent to `peer` in `steps` steps, in bytes. `peer` -1: nothing but that it made these steps."""

    rank: int
    peer: int
    steps: int
    nbytes: float = 0.0


class AskHops(msgspec.Struct, frozen=True):
    """Ask the agent of `node` about `ways`, at each of `ttls`."""

    node: str
    number: int
    ways: tuple[Way, ...]
    ttls: tuple[int, ...]


class AskCounts(msgspec.Struct, frozen=True):
    """Ask the agent of `node` what the connections of `ways` have carried."""

    node: str
    number: int
    ways: tuple[Way, ...]


class GivePaths(msgspec.Struct, frozen=True):
    """Give `rank` the plan `number`: ports to dial peers from, and those that peers call from."""

    rank: int
    number: int
    dial: dict[int, tuple[int, ...]]
    accept: dict[int, tuple[int, ...]]


class Renew(msgspec.Struct, frozen=True):
    """Have all links made anew, because the one of `rank` to `peer` carries nothing."""

    rank: int
    peer: int


class Tell(msgspec.Struct, frozen=True):
    """Say and journal: what changed in the plan, in words, or what could not be (`failed`). `moved` flows changed their
    way."""

    text: str
    moved: int = 0
    added: int = 0
    max_load: float = 0.0
    bound: float = 0.0
    routes: tuple[Route, ...] = ()
    down: tuple[str, ...] = ()
    failed: bool = False


Action = AskHops | AskCounts | GivePaths | Renew | Tell
