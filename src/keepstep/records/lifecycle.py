"""Records of a job's life: start and end, members, facts, orders, progress and drills."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from keepstep.records.identity import Record
from keepstep.records.messages import Fact, Order, Welcome

__all__ = [
    "DrillRecord",
    "FactRecord",
    "JobEnded",
    "JobStarted",
    "LeaderRecord",
    "MemberRecord",
    "OrderRecord",
    "StepProgress",
    "StopAsked",
    "TimePassed",
    "without_secret",
]


class JobStarted(Record, frozen=True, kw_only=True, tag=True):
    """A job (or, with `attempt` above 0, the job once more) begins."""

    script: Annotated[str, Meta(description="the user's script")]
    arguments: Annotated[tuple[str, ...], Meta(description="its arguments")] = ()
    world: Annotated[int, Meta(ge=0, description="ranks")] = 0
    standbys: Annotated[int, Meta(ge=0, description="standbys asked for")] = 0
    nodes: Annotated[tuple[str, ...], Meta(description="hosts taking part")] = ()
    keepstep_version: Annotated[str, Meta(description="version that runs the job")] = ""
    torch_version: Annotated[str, Meta(description="empty: not known yet")] = ""
    python_version: Annotated[str, Meta(description="empty: not known yet")] = ""


class JobEnded(Record, frozen=True, kw_only=True, tag=True):
    """The job is over for everybody."""

    exit_code: Annotated[int, Meta(description="what the launcher returns")]
    why: Annotated[str, Meta(description="reason in words")] = ""
    steps_kept: Annotated[int, Meta(ge=0, description="updates in the final weights")] = 0
    kept_step_share: Annotated[float | None, Meta(description="kept steps / steps computed")] = None
    weights_sha256: Annotated[
        str, Meta(description="of the final weights (sharded: of all ranks' hashes in order); empty: unknown")
    ] = ""
    false_alarm_s: Annotated[float, Meta(description="time lost to wrong findings", extra={"unit": "s"})] = 0.0


class MemberRecord(Record, frozen=True, kw_only=True, tag=True):
    """A member started, exited, was fenced, or (a standby) was promoted to `rank`."""

    change: Annotated[Literal["started", "exited", "fenced", "promoted"], Meta(description="what happened")]
    pid: Annotated[int | None, Meta(description="process id on `node`")] = None
    code: Annotated[int | None, Meta(description="exit status; with `exited`")] = None
    signal: Annotated[int | None, Meta(description="signal that ended it; with `exited`, 0: none")] = None
    why: Annotated[str, Meta(description="reason in words")] = ""


class FactRecord(Record, frozen=True, kw_only=True, tag=True):
    """A fact as it reached the controller, whole: replaying facts rebuilds the controller's state."""

    fact: Annotated[Fact, Meta(description="the message")]
    number: Annotated[int, Meta(ge=0, description="the agent's number for it; 0: it gives none")] = 0


class TimePassed(Record, frozen=True, kw_only=True, tag=True):
    """The controller did something because time had passed (a patience that ended); without effect it is not kept."""


class StopAsked(Record, frozen=True, kw_only=True, tag=True):
    """A person or the scheduler ends the job with `code`."""

    code: Annotated[int, Meta(description="what the launcher is to return")]
    why: Annotated[str, Meta(description="reason in words")] = ""


class LeaderRecord(Record, frozen=True, kw_only=True, tag=True):
    """A controller leads the job in `epoch` from here on: the first one, or one that took over."""

    epoch: Annotated[int, Meta(ge=0, description="the new leader's epoch")]


class OrderRecord(Record, frozen=True, kw_only=True, tag=True):
    """An order as it was given. A data-plane secret in it is blanked before it is written."""

    order: Annotated[Order, Meta(description="the message")]
    epoch: Annotated[int, Meta(ge=0, description="the leader's epoch")] = 0
    target: Annotated[str, Meta(description="member or node it went to")] = ""
    reason: Annotated[str, Meta(description="why it was given")] = ""
    number: Annotated[int, Meta(ge=0, description="which of all orders to its node, from 1; 0: not counted")] = 0


class StepProgress(Record, frozen=True, kw_only=True, tag=True):
    """A sample of the job's progress: `step` is the last kept step."""

    total: Annotated[int | None, Meta(description="steps asked for")] = None
    loss: Annotated[float | None, Meta(description="as the script reported it; not-a-number reads as null")] = None
    step_s: Annotated[float | None, Meta(description="time of one step", extra={"unit": "s"})] = None
    members: Annotated[int | None, Meta(description="live members")] = None
    standbys: Annotated[int | None, Meta(description="standbys ready")] = None


class DrillRecord(Record, frozen=True, kw_only=True, tag=True):
    """A fault was injected into `rank` (or a link from it) at `step` at `wall`, or `ended` there."""

    fault: Annotated[str, Meta(description="what was done: kill, freeze, slow-compute, ...")]
    requested_step: Annotated[int | None, Meta(description="step it was asked for; -1: at once")] = None
    ended: Annotated[bool, Meta(description="true: the fault was taken away again")] = False
    peers: Annotated[tuple[int, ...], Meta(description="ranks at the other end of drilled links")] = ()
    factor: Annotated[float | None, Meta(description="how many times as long a step takes")] = None
    rate: Annotated[float | None, Meta(description="limit of drilled links", extra={"unit": "B/s"})] = None
    note: Annotated[str, Meta(description="what was done, in numbers")] = ""
    number: Annotated[int, Meta(ge=0, description="the agent's number for the fact; 0: it gives none")] = 0


def without_secret(record: OrderRecord) -> OrderRecord:
    """`record` with the data-plane secret of a `Welcome` blanked; every other record unchanged."""
    if isinstance(record.order, Welcome) and record.order.secret:
        return msgspec.structs.replace(record, order=msgspec.structs.replace(record.order, secret=b""))
    return record
