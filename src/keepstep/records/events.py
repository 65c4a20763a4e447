"""Everything a journal may hold: one tagged union, and the names of its parts in one place."""

from __future__ import annotations

from keepstep.records.coverage_records import CoverageRecord
from keepstep.records.finding import FINDING_KINDS, LAYERS, Finding, FindingKind, Layer, Suspect
from keepstep.records.identity import Record
from keepstep.records.incident import PHASES, Incident
from keepstep.records.lifecycle import (
    DrillRecord,
    FactRecord,
    JobEnded,
    JobStarted,
    LeaderRecord,
    MemberRecord,
    OrderRecord,
    StepProgress,
    StopAsked,
    TimePassed,
    without_secret,
)
from keepstep.records.moves import MoveAsked, MoveRecord
from keepstep.records.plan import TrafficChange, TrafficOutcome, TrafficRoutes
from keepstep.records.schema import SCHEMA

__all__ = [
    "FINDING_KINDS",
    "LAYERS",
    "PHASES",
    "SCHEMA",
    "CoverageRecord",
    "DrillRecord",
    "Event",
    "FactRecord",
    "Finding",
    "FindingKind",
    "Incident",
    "JobEnded",
    "JobStarted",
    "Layer",
    "LeaderRecord",
    "MemberRecord",
    "MoveAsked",
    "MoveRecord",
    "OrderRecord",
    "Record",
    "StepProgress",
    "StopAsked",
    "Suspect",
    "TimePassed",
    "TrafficChange",
    "TrafficOutcome",
    "TrafficRoutes",
    "without_secret",
]

Event = (
    JobStarted
    | JobEnded
    | MemberRecord
    | FactRecord
    | OrderRecord
    | StepProgress
    | Finding
    | Incident
    | DrillRecord
    | TimePassed
    | LeaderRecord
    | StopAsked
    | MoveAsked
    | MoveRecord
    | TrafficChange
    | TrafficRoutes
    | TrafficOutcome
    | CoverageRecord
)
"""Any record of the journal; its tag (the class name) is the field `record` of a line."""
