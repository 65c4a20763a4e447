"""What other tools saw of a job, in one neutral form: every intake fills it, every offline diagnosis takes it.

Nothing here is a verdict. A value that a tool did not give is None; a value that it gave is kept as it was, with times
brought to seconds. Ranks are global ranks. These are values inside one process, not lines of the journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from keepstep.records.operation_trace import OperationTrace
    from keepstep.records.timing_table import TimingTable

__all__ = [
    "MAY_BE_CAUGHT",
    "CollectiveRecord",
    "Evidence",
    "Frame",
    "GroupProgress",
    "LogEvent",
    "Place",
    "Position",
    "Reporter",
    "ReporterState",
    "Signature",
    "StackSample",
    "StepTiming",
    "Transfer",
    "TransferCount",
    "Unread",
]

MAY_BE_CAUGHT = frozenset(
    {
        "exception",
        "gpu_memory",
        "storage_error",
        "file_damaged",
        "too_many_files",
        "wrong_address",
        "loader_worker",
        "peer_closed",
    }
)
"""Kinds of log events after which a program may go on; with the step before them as `after_step`, if one was told."""

ReporterState = Literal["present", "empty", "truncated", "duplicate", "absent", "dead", "behind", "failed", "unclear"]
"""present: said something; empty: answered without content; truncated: cut off; duplicate: reported twice, kept once;
absent: expected, nothing came; dead: another tool says that its process is gone; behind: another tool says that it has
launched fewer collectives than the others; failed: it reports an error of its own; unclear: another tool says that
something is wrong, and not with whom."""


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What a collective is: all members of a group must agree on it. Sizes are element counts per dimension."""

    op: str
    """Name of the operation in lower case with underscores, such as `all_reduce`; as the tool wrote it otherwise."""
    dtype: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the inputs (of the outputs where the tool gives only those)."""
    root: int | None = None
    """Global rank of the root of a broadcast, gather, scatter or reduce."""
    count: int | None = None
    """Number of elements where no shape is known."""


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack, innermost first in every tuple of them."""

    function: str
    file: str = ""
    line: int | None = None


class CollectiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One collective or point-to-point operation as one rank saw it. Times are wall-clock seconds since 1970."""

    rank: int
    group: str
    sequence: int
    signature: Signature
    ranks: tuple[int, ...] = ()
    """Members of the group; empty if unknown."""
    description: str = ""
    """What the group is for, such as `TENSOR_MODEL_PARALLEL_GROUP`."""
    point_to_point: bool = False
    source: int | None = None
    """Sender, if point-to-point."""
    destination: int | None = None
    """Receiver, if point-to-point."""
    state: Literal["scheduled", "started", "completed", "unknown"] = "unknown"
    queued: float | None = None
    started: float | None = None
    finished: float | None = None
    duration_s: float | None = None
    timeout_s: float | None = None
    stack: tuple[Frame, ...] = ()
    process: str = ""
    """Which process of the file recorded it, where a file may be of several."""
    path: str = ""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is in one group: sequence numbers of its newest queued, started and finished collective.

    None means that the tool does not say. A rank that has none at all has 0 or -1, as the tool counts from 1 or 0.
    """

    rank: int
    queued: int | None = None
    started: int | None = None
    finished: int | None = None
    signatures: dict[int, Signature] = {}
    """By sequence: what this rank thinks the collective is. Sequences it does not remember are left out."""
    waiting_since: float | None = None
    """Wall-clock time at which its oldest unfinished collective was queued; None: unknown, or nothing is unfinished."""
    remembered: tuple[tuple[int, float], ...] = ()
    """Sequence and wall-clock time of the oldest and the newest collective that it remembers; empty: no times."""


class GroupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far every member of one group has come. A member of `ranks` without a position said nothing of this group."""

    group: str
    ranks: tuple[int, ...]
    positions: tuple[Position, ...]
    description: str = ""
    kinds: str = ""
    """Which operations the sequence counts, where a tool counts each kind apart (NCCL RAS); empty: all."""
    snapshot: bool = False
    """Taken from a job that may be running, so that being one operation behind means nothing."""
    size: int | None = None
    """How many members it has, where a report does not name them."""
    members_known: bool = True
    """Whether `ranks` are all members; if not, they are only those that spoke."""
    by_device: bool = True
    """Whether devices work its operations off; if not, the processes do, as with Gloo."""
    failed_counts: bool = False
    """Whether an operation that failed counts as finished, as in dumps of Gloo."""
    moment: str = ""
    """Of which moment it tells, where there are several of one job: numbers of two moments are not compared."""
    path: str = ""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A point-to-point operation that `rank` has queued and not finished: it waits for the other end."""

    rank: int
    source: int
    destination: int
    group: str = ""
    sequence: int | None = None
    queued: float | None = None
    ordinal: int | None = None
    """Its number among those from source to destination in this group since the start of the job; None: unknown."""
    moment: str = ""
    path: str = ""


class TransferCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many point-to-point operations from `source` to `destination` one of the two ends has finished."""

    rank: int
    source: int
    destination: int
    group: str = ""
    finished: int
    from_start: bool
    """Whether all since the start of the job are counted; if not, only those that are remembered."""
    moment: str = ""
    path: str = ""


class Reporter(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank (or a process of which only node, device and pid are known) spoke to the tool."""

    state: ReporterState
    rank: int | None = None
    node: str | None = None
    device: str | None = None
    pid: int | None = None
    detail: str = ""
    path: str = ""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs, as a tool says."""

    rank: int
    node: str | None = None
    device: str | None = None
    pid: int | None = None
    coordinates: dict[str, int] = {}
    """`dp`, `tp`, `stage`, `ep` where they are known."""


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How long one rank took for one step, or for one phase of it."""

    rank: int
    step: int
    seconds: float
    phase: str = "step"
    """`step`, `forward`, `backward`, `compute`, `data`, `communication`, `optimizer`, `checkpoint`, or
    the tool's word."""
    node: str | None = None
    coordinates: dict[str, int] = {}


class LogEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line (or one group of lines) of a log that means something."""

    kind: str
    """What it says, a word of the reader, such as `watchdog_timeout`."""
    path: str = ""
    line: int = 0
    """Line number from 1."""
    text: str = ""
    """The line, without colours and control characters, cut to 500 characters."""
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    wall: float | None = None
    """Seconds since 1970, if the line has a full date."""
    fields: dict[str, str] = {}


class StackSample(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of one thread of one process at one moment."""

    frames: tuple[Frame, ...]
    rank: int | None = None
    node: str | None = None
    pid: int | None = None
    thread: str = ""
    active: bool | None = None
    """Whether the thread was running; None: the tool does not say."""
    path: str = ""


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or a part of one, that could not be read, and why. Naming it is part of the answer."""

    path: str
    why: str


Evidence: TypeAlias = (
    "CollectiveRecord | GroupProgress | Transfer | TransferCount | Reporter | Place | StepTiming | LogEvent"
    " | StackSample | Unread | TimingTable | OperationTrace"
)
"""Everything that an intake may yield."""
