"""What can be seen from outside of a process that knows nothing of keepstep: kernel counters and where it stands."""

from __future__ import annotations

import msgspec

__all__ = ["PlainReport", "PlainSample"]


class PlainSample(msgspec.Struct, frozen=True, array_like=True):
    """One look at `rank`. Times are totals of the process in us; `state` is the letter of proc(5).

    `place` is where its main thread stands (`diagnosis.stack_places.WhereAbouts`), `stack` a digest of its frames (0:
    unknown), `where` its innermost line of the script's own, `at` that of the innermost call. `turns` is how often that
    thread was given a processor.
    """

    rank: int
    member: str
    state: str
    cpu_us: int
    run_delay_us: int
    place: str
    stack: int
    where: str = ""
    at: str = ""
    turns: int = 0


class PlainReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The samples of one node at `wall` (s since 1970). `network_bytes` is what all its interfaces have moved."""

    node: str
    wall: float
    samples: tuple[PlainSample, ...]
    network_bytes: int = 0
