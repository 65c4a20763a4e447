"""What a trial keeps: the first steps of one rank, run alone as in a world of a wanted size, one record a line.

A trial process writes these as JSON lines while it runs, so that what it did is there even if it is ended by force.
"""

from __future__ import annotations

import msgspec

from keepstep.errors import TornRecord

__all__ = [
    "Barred",
    "CallKept",
    "DataSeen",
    "GroupAsked",
    "Guessed",
    "Joined",
    "MeshAsked",
    "RankRead",
    "SiteSeen",
    "StepBegun",
    "StepsAsked",
    "Trace",
    "TrialEnded",
    "TrialFinding",
    "TrialPlan",
    "TrialRecord",
    "WaitKept",
    "decode_record",
    "encode_record",
    "place_of",
    "scratch_name",
    "trace_of",
]


class TrialPlan(msgspec.Struct, frozen=True):
    """What all trials of a preflight share. `local` ranks sit on a node; a trial may take `limit_s` seconds.

    `guess`: an object that nobody has sent yet does not end the trial.
    """

    script: str
    arguments: tuple[str, ...]
    world: int
    steps: int
    local: int
    limit_s: float
    directory: str
    guess: bool = False


class SiteSeen(msgspec.Struct, frozen=True, tag="site", array_like=True):
    """A place in the script, by the `number` that later records use: file, line (from 1) and function."""

    number: int
    file: str
    line: int
    function: str


class GroupAsked(msgspec.Struct, frozen=True, tag="group", array_like=True):
    """The script made a group of global `ranks` (empty: the whole world). `alone`: only its members make the call.

    Groups are numbered from 0 in the order in which this rank made them; 0 is the default group.
    """

    ranks: tuple[int, ...]
    member: bool
    alone: bool
    purpose: str
    site: int


class MeshAsked(msgspec.Struct, frozen=True, tag="mesh", array_like=True):
    """A device mesh of `shape` with dimensions called `names`."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    site: int


class CallKept(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """One collective or point-to-point call. Numbers of op, element and reduction are the recorder's; -1: none.

    `sent` and `got` are bytes of all inputs and outputs. `peer` (global rank) and `tag` are those of a send or receive.
    `even`: all parts have one size. `free`: its size comes from data (an object, parts chosen by the script).
    `value` is a checksum of few integers that were given, 0 for anything else.
    """

    number: int
    group: int
    op: int
    element: int
    reduction: int
    root: int
    peer: int
    tag: int
    sent: int
    got: int
    even: bool
    free: bool
    value: int
    shapes: tuple[tuple[int, ...], ...]
    site: int
    step: int


class WaitKept(msgspec.Struct, frozen=True, tag="wait", array_like=True):
    """The script waited for the end of call `number`."""

    number: int


class StepBegun(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """Step `number` began, counted from 0."""

    number: int


class StepsAsked(msgspec.Struct, frozen=True, tag="steps", array_like=True):
    """`job.steps(total)` was called."""

    total: int
    site: int


class DataSeen(msgspec.Struct, frozen=True, tag="data", array_like=True):
    """A source of batches: how many it says it has (-1: unknown). `kind` is `stream` for `job.data`, which begins anew
    at the end, `once` for a stream over an iterator, which cannot, `loop` for a loader that is iterated plainly."""

    kind: str
    batches: int
    site: int


class Joined(msgspec.Struct, frozen=True, tag="joined", array_like=True):
    """The script took its place in the job: `how` is `join` or `init_process_group`; world and rank as it gave them, -1
    where it left them to the environment."""

    how: str
    world: int
    rank: int
    site: int


class RankRead(msgspec.Struct, frozen=True, tag="rank", array_like=True):
    """The script read the variable `name` before it joined; `default`: it would go on without one."""

    name: str
    default: bool
    site: int


class Barred(msgspec.Struct, frozen=True, tag="barred", array_like=True):
    """Something that a trial does not let out: `what` is `write`, `remove` or `process`, `name` the file or program."""

    what: str
    name: str
    site: int


class Guessed(msgspec.Struct, frozen=True, tag="guessed", array_like=True):
    """An object that rank `peer` sends was needed and not known; something else was given."""

    peer: int


class TrialEnded(msgspec.Struct, frozen=True, tag="end", array_like=True):
    """How it ended: `steps` (as many as were wanted), `script` (it ended by itself), `error`, `exit`, or `starved` (it
    needs an object from the rank in `text` first).

    `full` means that it did too much to be kept. `error` is the name of the exception, `text` its message or the exit
    code, `line` the script's line it came from. `updates` counts optimizer steps. Bytes are of this process's resident
    memory: the peak before the script began, the peak over all, and files in memory that processes share.
    """

    how: str
    error: str
    text: str
    line: str
    site: int
    updates: int
    before_bytes: int
    peak_bytes: int
    shared_bytes: int


TrialRecord = (
    SiteSeen
    | GroupAsked
    | MeshAsked
    | CallKept
    | WaitKept
    | StepBegun
    | StepsAsked
    | DataSeen
    | Joined
    | RankRead
    | Barred
    | Guessed
    | TrialEnded
)

_decoder = msgspec.json.Decoder(TrialRecord)
_encoder = msgspec.json.Encoder()


def encode_record(record: TrialRecord) -> bytes:
    """One line, with its end."""
    return _encoder.encode(record) + b"\n"


def decode_record(line: bytes) -> TrialRecord:
    """The record of a line. Raises TornRecord."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise TornRecord(f"not a record of a trial: {error}") from error


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All records of one trial. `ended` is None if it was ended by force: then `cut` says why (`hang`, `memory`,
    `died`, `output`) and `stack` holds the places of its main thread, the innermost first."""

    rank: int
    sites: dict[int, SiteSeen] = {}
    groups: tuple[GroupAsked, ...] = ()
    meshes: tuple[MeshAsked, ...] = ()
    events: tuple[CallKept | WaitKept, ...] = ()
    steps: int = 0
    asked: tuple[StepsAsked, ...] = ()
    data: tuple[DataSeen, ...] = ()
    joined: tuple[Joined, ...] = ()
    reads: tuple[RankRead, ...] = ()
    barred: tuple[Barred, ...] = ()
    guessed: tuple[Guessed, ...] = ()
    ended: TrialEnded | None = None
    cut: str = ""
    cut_text: str = ""
    stack: tuple[str, ...] = ()

    @property
    def starved_of(self) -> int:
        """The rank that has to have its trial before this one can go on; -1: none."""
        return int(self.ended.text) if self.ended is not None and self.ended.how == "starved" else -1

    @property
    def whole(self) -> bool:
        """Whether it made the steps it was asked for, or the script's own end."""
        return self.ended is not None and self.ended.how in ("steps", "script")


class TrialFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What would fail: its `kind`, the `ranks` it was seen on, the places (`file:line`), what is wrong, what to do."""

    kind: str
    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    what: str
    remedy: str
    evidence: tuple[str, ...] = ()


def trace_of(rank: int, records: list[TrialRecord], **cut: object) -> Trace:
    """The trace that `records` of `rank` make; `cut` as the fields of `Trace`."""
    by_kind: dict[type, list[TrialRecord]] = {}
    for record in records:
        by_kind.setdefault(type(record), []).append(record)

    def those(*kinds: type) -> tuple[TrialRecord, ...]:
        if len(kinds) == 1:
            return tuple(by_kind.get(kinds[0], ()))
        return tuple(record for record in records if isinstance(record, kinds))

    ends = those(TrialEnded)
    fields = {
        "rank": rank,
        "sites": {site.number: site for site in those(SiteSeen) if isinstance(site, SiteSeen)},
        "groups": those(GroupAsked),
        "meshes": those(MeshAsked),
        "events": those(CallKept, WaitKept),
        "steps": len(those(StepBegun)),
        "asked": those(StepsAsked),
        "data": those(DataSeen),
        "joined": those(Joined),
        "reads": those(RankRead),
        "barred": those(Barred),
        "guessed": those(Guessed),
        "ended": ends[-1] if ends else None,
    }
    return Trace(**{**fields, **cut})  # type: ignore[arg-type]


def scratch_name(rank: int) -> str:
    """What the directory is called, in that of the plan, where a trial of `rank` has its files."""
    return f"files-{rank}"


def place_of(trace: Trace, site: int) -> str:
    """`file:line` of a site of `trace`; empty where it is not known."""
    seen = trace.sites.get(site)
    return f"{seen.file}:{seen.line}" if seen is not None else ""
