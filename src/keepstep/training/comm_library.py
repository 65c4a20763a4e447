"""What is used of a library of device communicators (NCCL), and how the members of a group come to a common one.

NOT RUN ON GPUs. Facts behind the rules, as NCCL documents them: shrink since 2.27.3, revoke since 2.28.7, grow since
2.29.2; a grow makes a whole new communicator in which those who were there keep their order and new ranks come last;
what was shrunk with the abort flag must be aborted, never destroyed (2.31 hangs there); a device is one rank only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

__all__ = ["GROW", "REVOKE", "CommLibrary", "CommState", "Formation", "How", "Report", "Step", "formation_of"]

REVOKE, GROW = 22807, 22902
"""Versions of the library that have revoke and grow (which needs shrink, older than both)."""

_REPORT = struct.Struct("<I16sIiBB")


class CommState(Enum):
    """How far a communicator is."""

    WORKING = "working"
    READY = "ready"
    FAILED = "failed"


class Step(NamedTuple):
    """One primitive of the library, on device memory. `peer` is a rank of the communicator: root, source or target.

    `kind` is all_reduce, reduce, broadcast, all_gather, reduce_scatter, send or recv; `amount` counts elements, of the
    part of one rank for all_gather and reduce_scatter. `element` and `reduction` are those of the data plane.
    """

    kind: str
    source: int
    target: int
    amount: int
    element: int
    reduction: int = 0
    peer: int = -1


class CommLibrary(Protocol):
    """The library. A communicator is a number here. Every method may raise TransportError; none but `abort` and
    `revoke` may block for long: a communicator that is being made is WORKING."""

    @property
    def version(self) -> int:
        """As NCCL counts: 22902 is 2.29.2."""
        ...

    def unique_id(self, parent: int | None) -> bytes:
        """What those who form (or, with `parent`, grow) a communicator have in common; at most 128 bytes."""
        ...

    def form(self, unique_id: bytes, *, size: int, rank: int) -> int:
        """Begins a communicator."""
        ...

    def shrink(self, parent: int, *, excluded: Sequence[int], abort: bool) -> int:
        """Begins one of the ranks of `parent` that are not `excluded`; with `abort` the parent's work is ended."""
        ...

    def grow(self, parent: int | None, *, size: int, rank: int, unique_id: bytes | None) -> int:
        """Begins one of `parent` and newcomers, who have no parent but their `rank`."""
        ...

    def state(self, comm: int) -> CommState:
        """How far it is, and whether something failed on it."""
        ...

    def revoke(self, comm: int) -> None:
        """Ends its work; it can still be shrunk. May hang."""
        ...

    def abort(self, comm: int) -> None:
        """Ends its work and gives it up. May hang."""
        ...

    def run(self, comm: int, steps: Sequence[Step], *, stream: Any) -> None:
        """Begins to enqueue `steps` on a stream of the device, all as one operation; WORKING until that is done."""
        ...


class Report(NamedTuple):
    """What a member brings to the common decision.

    `version` of its library (0: none), identity of its `device`, `serial` of the communicator it holds (0: none),
    its `rank` there, whether it is `whole` (nothing was cut off) and otherwise whether it was only `revoked`.
    """

    version: int
    device: bytes
    serial: int
    rank: int
    whole: bool
    revoked: bool

    def pack(self) -> bytes:
        """As bytes of a fixed size."""
        return _REPORT.pack(self.version, self.device, self.serial, self.rank, self.whole, self.revoked)

    @classmethod
    def unpack(cls, data: bytes) -> Report:
        """What `pack` gave."""
        version, device, serial, rank, whole, revoked = _REPORT.unpack(data)
        return cls(version, device, serial, rank, bool(whole), bool(revoked))

    @classmethod
    def size(cls) -> int:
        """Bytes of a packed report."""
        return _REPORT.size


class How(Enum):
    """What the members of a group do to have a common communicator."""

    KEEP = "keep"
    GROW = "shrink and grow"
    REBUILD = "rebuild"
    HOST = "through host memory"


class Formation(NamedTuple):
    """The decision. `order[comm rank]` is the role (rank in the group), `serial` names the new communicator,
    `excluded` are the ranks of the old one that go, and `abort` says that its work may have to be ended."""

    how: How
    order: tuple[int, ...] = ()
    serial: int = 0
    excluded: tuple[int, ...] = ()
    abort: bool = False


def formation_of(reports: Sequence[Report], *, may_grow: bool = True) -> Formation:
    """The same decision on every member, from the reports of all in the order of their roles.

    Who was there keeps its order in a grown communicator, newcomers follow in the order of their roles.
    """
    size = len(reports)
    alone = size == 1 or len({report.device for report in reports}) < size
    if alone or any(not report.version for report in reports):
        return Formation(How.HOST)
    newest = max(report.serial for report in reports)
    holders = [role for role, one in enumerate(reports) if one.serial == newest and (one.whole or one.revoked)]
    if newest and len(holders) == size and all(one.whole for one in reports):
        return Formation(How.KEEP, _by_rank(reports, holders), newest)
    serial = newest + 1
    if may_grow and newest and 0 < len(holders) < size and min(one.version for one in reports) >= GROW:
        kept = {reports[role].rank for role in holders}
        newcomers = tuple(role for role in range(size) if role not in holders)
        excluded = tuple(rank for rank in range(size) if rank not in kept)
        abort = not all(reports[role].revoked for role in holders)
        return Formation(How.GROW, _by_rank(reports, holders) + newcomers, serial, excluded, abort)
    return Formation(How.REBUILD, tuple(range(size)), serial)


def _by_rank(reports: Sequence[Report], roles: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(roles, key=lambda role: reports[role].rank))
