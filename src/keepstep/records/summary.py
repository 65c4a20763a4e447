"""What an agent says of its members while they run: windows of whole steps, and where each stands when nothing ends.

At most 1 KB/s a rank goes up (`BYTES_PER_S`); a summariser spaces its messages by their size. Tables are packed rows
whose layout is in `records.summary_rows`; structs that are sent often are arrays, not maps.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "BYTES_PER_S",
    "MAX_PEER_ROWS",
    "Fingerprint",
    "GroupEntry",
    "GroupMark",
    "HostSample",
    "MemberProfile",
    "MemberProgress",
    "MemberSummary",
    "OpenTransfer",
    "StalledPeer",
    "WatchReport",
]

BYTES_PER_S = 1000
"""Most bytes a second that may be said of one rank, averaged over its messages."""

MAX_PEER_ROWS = 16
"""Most rows of one window's peer table; of more peers the extremes are kept."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The environment that makes a step time normal. A baseline holds for equal fingerprints and for no other."""

    world: int = 0
    layout: tuple[tuple[str, int, int], ...] = ()
    """(kind, groups, size) of every family of process groups, sorted."""
    batch: str = ""
    """Shapes of one batch as text, such as `(8,1024)int64`."""
    topology: str = ""
    """Digest of which rank is on which node."""
    versions: tuple[tuple[str, str], ...] = ()
    """(name, version) of libraries, drivers and firmware, sorted."""
    hardware: tuple[str, ...] = ()
    """What the nodes are made of, sorted, each once."""


class GroupEntry(msgspec.Struct, frozen=True, array_like=True):
    """One process group as a member knows it. `lane` is 0 for collectives and 1 for point-to-point messages."""

    name: str
    hash: int
    lane: int
    size: int
    group_rank: int


class MemberProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What changes seldom about a rank: its groups by name and its part of the environment. Sent when it changes."""

    rank: int
    generation: int
    groups: tuple[GroupEntry, ...] = ()
    batch: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    hardware: str = ""


class HostSample(msgspec.Struct, frozen=True, array_like=True):
    """What the kernel says of a process. Totals since it began, in us: CPU time and time it was runnable without a CPU.

    `state` is the letter of `/proc/PID/stat` ("" unknown). `stack` is a digest of its Python stacks (0: not taken).
    """

    cpu_us: int = 0
    run_delay_us: int = 0
    state: str = ""
    stack: int = 0


class MemberSummary(msgspec.Struct, frozen=True, array_like=True):
    """One rank over the whole steps `first_step` to `last_step` (both in it) of a generation.

    `ended_ns` is the monotonic time of the end of the last step on the member's host. `cpu_us` and `run_delay_us`
    are what the process used and what it waited for a CPU over `span_us` of the host's clock. `lost` counts slots
    that were overwritten before they were read. Tables: `steps` one STEP_ROW a step, `peers` at most `MAX_PEER_ROWS`
    PEER_ROWs; `groups` one GROUP_ROW a group over all steps since the last one, now and then and where a group is new
    (else empty).
    """

    rank: int
    generation: int
    first_step: int
    last_step: int
    ended_ns: int
    span_us: int
    cpu_us: int
    run_delay_us: int
    lost: int
    steps: bytes
    groups: bytes
    peers: bytes


class StalledPeer(msgspec.Struct, frozen=True, array_like=True):
    """One peer in the call that is under way: bytes that passed so far, and how long it waits for what, in us."""

    peer: int
    bytes_sent: int
    bytes_received: int
    wait_own_us: int
    wait_credit_us: int
    wire_us: int
    wait_peer_us: int


class GroupMark(msgspec.Struct, frozen=True, array_like=True):
    """How far a member is in one group: collectives queued, started and finished in this generation.

    `op`, `element`, `count`, `root` and `sequence` (from 0) are the newest call that was started (op 0: none in the
    ring); `open_us` is how long it has been under way (0: it ended). `before` is how often the member called the very
    same (operation, element, count, root) in this group before, as far as the ring reaches. `peers` is filled where
    the recorder says it.
    """

    hash: int
    lane: int
    size: int
    group_rank: int
    queued: int
    started: int
    finished: int
    op: int = 0
    element: int = 0
    count: int = 0
    root: int = 0
    sequence: int = 0
    open_us: int = 0
    before: int = 0
    peers: tuple[StalledPeer, ...] = ()


class OpenTransfer(msgspec.Struct, frozen=True, array_like=True):
    """A point-to-point message under way: `send` or receive, with `peer` (-1: any or unknown), for `open_us`."""

    hash: int
    send: bool
    peer: int
    sequence: int
    open_us: int


class MemberProgress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank stands while no step ends. Ages in us, as of `mono_ns` on the member's host.

    `span` is the innermost open span (`SpanKind`; 0: none, it is between two steps), open for `span_us`. `idle_us` is
    the time since a step, span or collective last began or ended; `heartbeat_us` the age of the recorder's sign of
    life (0: it gives none).
    """

    rank: int
    generation: int
    step: int
    mono_ns: int
    span: int
    span_us: int
    idle_us: int
    heartbeat_us: int
    host: HostSample
    groups: tuple[GroupMark, ...] = ()
    transfers: tuple[OpenTransfer, ...] = ()


class WatchReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the agent of `node` says at `wall` (s since 1970; its monotonic clock says `mono_ns`) of its members.

    A report without members is a sign of life.
    """

    node: str
    wall: float
    mono_ns: int
    profiles: tuple[MemberProfile, ...] = ()
    windows: tuple[MemberSummary, ...] = ()
    progress: tuple[MemberProgress, ...] = ()
