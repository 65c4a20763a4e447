"""What a job sends: where its ranks sit, which collectives it runs, and the flows between NIC ports that follow."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Collective",
    "CollectiveUse",
    "DeclaredCollective",
    "Demand",
    "Flow",
    "GroupKind",
    "JobLayout",
    "Seat",
]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send"]
GroupKind = Literal["tp", "dp", "pp", "ep", "world"]


class Seat(msgspec.Struct, frozen=True):
    """Where one rank sits: its host, and its number among the `slots` ranks of that host."""

    rank: int
    host: str
    local: int = 0
    slots: int = 1


class CollectiveUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A collective that a group runs in every step.

    `ranks` in group order (a send: pairs from, to, from, to ...). `nbytes` is the full tensor of an all_reduce,
    reduce_scatter, all_gather, broadcast or reduce, what one rank sends in all of an all_to_all, and one message of a
    send; `calls` how often in a step. Active from `start_s` to `end_s` of the step (both 0: unknown, so always).
    `measured_bytes` are the bytes per step to each peer as recorded, `(from, to, bytes)`; they replace the formula.
    """

    name: str
    operation: Collective
    ranks: tuple[int, ...]
    nbytes: float = 0.0
    calls: float = 1.0
    start_s: float = 0.0
    end_s: float = 0.0
    algorithm: Literal["ring", "tree"] = "ring"
    data_dependent: bool = False
    measured_bytes: tuple[tuple[int, int, float], ...] = ()


class Demand(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that one job asks of the network. `step_s` is the time of a step (0: unknown); more `priority` is dearer."""

    job: str
    seats: tuple[Seat, ...]
    uses: tuple[CollectiveUse, ...]
    step_s: float = 0.0
    priority: int = 0
    known: bool = True


class Flow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bytes from one NIC port to another, `nbytes` in every step; `use` is the collective they belong to.

    `part` counts the connections (queue pairs, sockets) that share the bytes of one edge.
    """

    job: str
    use: str
    source: str
    destination: str
    nbytes: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    part: int = 0

    @property
    def name(self) -> str:
        """Unique over all jobs."""
        return f"{self.job}:{self.use}:{self.source}>{self.destination}#{self.part}"


class DeclaredCollective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every group of a kind runs in a step; fields as in `CollectiveUse`. `back`: a send from later to earlier."""

    group: GroupKind
    operation: Collective
    nbytes: float = 0.0
    calls: float = 1.0
    start_s: float = 0.0
    end_s: float = 0.0
    algorithm: Literal["ring", "tree"] = "ring"
    data_dependent: bool = False
    back: bool = False


class JobLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job: its hosts in order of rank, ranks on each, and sizes of its groups (tp varies fastest, then dp, then pp;
    ep divides dp)."""

    job: str
    hosts: tuple[str, ...]
    collectives: tuple[DeclaredCollective, ...]
    ranks_per_host: int = 8
    tp: int = 1
    pp: int = 1
    dp: int = 0
    ep: int = 1
    step_s: float = 0.0
    priority: int = 0
    known: bool = True
