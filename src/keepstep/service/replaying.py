"""A job rebuilt from its journal: the same events through the same machine give the same state."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepstep.control.job import decide, new_job
from keepstep.control.job_state import Decision, Directed, JobSpec, JobState, StopRequest, TakeOver, Tick
from keepstep.control.job_state import Event as Input
from keepstep.errors import UsageError
from keepstep.records.events import Event, FactRecord, LeaderRecord, MoveAsked, OrderRecord, StopAsked, TimePassed
from keepstep.records.messages import Welcome
from keepstep.records.moves import MoveRequest
from keepstep.service.outbox import Outboxes

__all__ = ["Replayed", "acted", "event_record", "replay"]


class Replayed(msgspec.Struct, frozen=True):
    """A job as its journal leaves it: the machine's `state`, the newest fact `heard` from each node by number, and what
    was `sent` to them."""

    state: JobState
    heard: dict[str, int]
    sent: Outboxes


def replay(events: Iterable[Event], spec: JobSpec) -> Replayed:
    """Rebuild the job of `spec` from its journal. Raises UsageError if it was not led by this version of keepstep."""
    state: JobState | None = None
    heard: dict[str, int] = {}
    sent = Outboxes()
    for event in events:
        if isinstance(event, LeaderRecord) and state is None:
            state = new_job(spec, event.epoch)
        elif isinstance(event, OrderRecord) and event.number:
            sent.numbered(_directed(event, spec.secret))
        elif state is not None and (happened := _happened(event)) is not None:
            state = decide(state, happened, now=event.wall).state
            if isinstance(event, FactRecord) and event.number:
                heard[happened.source_node] = event.number
    if state is None:
        raise UsageError(
            "the journal does not say who led the job", remedy="jobs that an older keepstep began cannot be taken over"
        )
    return Replayed(state, heard, sent)


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
