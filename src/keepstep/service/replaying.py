"""A job rebuilt from its journal: the same events through the same machine give the same state.

A controller may die inside a turn, between the event it wrote and the last of what followed. What the journal lacks of
the last turn is decided again, too, for the next controller to write and send.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Decision, Directed, JobSpec, JobState, StopRequest, TakeOver, Tick
from keepstep.control.job_state import Event as Input
from keepstep.errors import UsageError
from keepstep.records.events import (
    DrillRecord,
    Event,
    FactRecord,
    Finding,
    Incident,
    LeaderRecord,
    MoveAsked,
    OrderRecord,
    StopAsked,
    TimePassed,
)
from keepstep.records.messages import Welcome
from keepstep.records.moves import MoveRecord, MoveRequest
from keepstep.service.outbox import Outboxes

__all__ = ["Replayed", "acted", "event_record", "order_record", "replay"]

_One = TypeVar("_One")


class Replayed(msgspec.Struct, frozen=True):
    """A job as its journal leaves it: the machine's `state`, the newest fact `heard` from each node by number, what
    was `sent` to them, and the part of the last decision that is `untold`: neither in the journal nor sent."""

    state: JobState
    heard: dict[str, int]
    sent: Outboxes
    untold: Decision


def replay(events: Iterable[Event], spec: JobSpec) -> Replayed:
    """Rebuild the job of `spec` from its journal. Raises UsageError if it was not led by this version of keepstep."""
    last: Decision | None = None
    told: list[Directed | Event] = []
    heard: dict[str, int] = {}
    sent = Outboxes()
    for event in events:
        if isinstance(event, LeaderRecord) and last is None:
            last = Decision(new_job(spec, event.epoch))
        elif isinstance(event, OrderRecord) and event.number:
            directed = sent.numbered(_directed(event, spec.secret))
            told.append(msgspec.structs.replace(directed, number=0))
        elif isinstance(event, Finding | Incident | MoveRecord):
            told.append(event)
        elif last is not None and (happened := _happened(event)) is not None:
            last = decide(last.state, happened, now=event.wall)
            told.clear()
        if isinstance(event, FactRecord | DrillRecord) and event.number:
            heard[event.node or ""] = event.number
    if last is None:
        raise UsageError(
            "the journal does not say who led the job", remedy="jobs that an older keepstep began cannot be taken over"
        )
    untold = msgspec.structs.replace(
        last,
        orders=_without(last.orders, told),
        findings=_without(last.findings, told),
        incidents=_without(last.incidents, told),
        moves=_without(last.moves, told),
    )
    return Replayed(last.state, heard, sent, untold)


def _without(decided: tuple[_One, ...], told: list[Directed | Event]) -> tuple[_One, ...]:
    """What is in `decided` more often than in `told`, in order."""
    known: list[object] = list(told)
    left = []
    for one in decided:
        if one in known:
            known.remove(one)
        else:
            left.append(one)
    return tuple(left)


def event_record(event: Input, *, job: str, now: float, number: int = 0) -> Event:
    """What the journal keeps of an event, so that the state can be rebuilt from it."""
    fact = event.fact
    if isinstance(fact, StopRequest):
        return StopAsked(job=job, wall=now, code=fact.code, why=fact.why)
    if isinstance(fact, TakeOver):
        return LeaderRecord(job=job, wall=now, epoch=fact.epoch)
    if isinstance(fact, MoveRequest):
        return MoveAsked(job=job, wall=now, request=fact)
    if isinstance(fact, Tick):
        return TimePassed(job=job, wall=now)
    return FactRecord(job=job, node=event.source_node, member=event.source_member, wall=now, fact=fact, number=number)


def order_record(directed: Directed, state: JobState, *, now: float) -> OrderRecord:
    """What the journal keeps of an order that is given in `state`."""
    return OrderRecord(
        job=state.spec.job,
        attempt=state.attempt,
        generation=state.generation,
        node=directed.node,
        member=directed.member or None,
        wall=now,
        order=directed.order,
        epoch=directed.order.epoch,
        target=directed.member or directed.node,
        reason=directed.reason,
        number=directed.number,
    )


def acted(before: JobState, decision: Decision) -> bool:
    """Whether an event changed more than the clock."""
    after = msgspec.structs.replace(decision.state, clock=before.clock)
    return bool(decision.orders or decision.findings or decision.incidents) or after != before


def _happened(event: Event) -> Input | None:
    """What the machine was told when this record was written; None if nothing."""
    if isinstance(event, FactRecord):
        return Input(event.node or "", event.member or "", event.fact)
    if isinstance(event, TimePassed):
        return Input("", "", Tick())
    if isinstance(event, StopAsked):
        return Input("", "", StopRequest(event.code, event.why))
    if isinstance(event, MoveAsked):
        return Input("", "", event.request)
    if isinstance(event, LeaderRecord):
        return Input("", "", TakeOver(event.epoch))
    return None


def _directed(record: OrderRecord, secret: bytes) -> Directed:
    """The order as it went out; the journal does not hold the secret."""
    order = record.order
    if isinstance(order, Welcome):
        order = msgspec.structs.replace(order, secret=secret)
    return Directed(record.node or "", record.member or "", order, record.reason, record.number)
