"""One operation and one group of a Flight Recorder dump, in one form for every version."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.records.evidence import Frame, Signature

__all__ = ["Entry", "Membership"]


@dataclass(frozen=True, slots=True)
class Membership:
    """A group as the dump of one of its members knows it."""

    ranks: tuple[int, ...] = ()
    """Global ranks; empty if the dump does not say."""
    description: str = ""
    queued: int | None = None
    """Newest queued sequence by `pg_status`; it counts transfers too, where the group has any."""
    finished: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation. Times are seconds since 1970."""

    group: str
    sequence: int
    signature: Signature
    ranks: tuple[int, ...]
    description: str
    point_to_point: bool
    ends: tuple[int, int] | None
    """Global ranks of sender and receiver of a transfer."""
    own_end: int | None
    """Global rank of the end that wrote the entry."""
    finished: bool
    started: bool
    queued: float | None
    timeout_s: float | None
    stack: tuple[Frame, ...]
    """Of what is not finished; else empty."""
    backend: str = ""
    """Which library does it, such as `nccl` or `gloo`."""
