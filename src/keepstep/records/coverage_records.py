"""What the loss of each failure domain would cost, as predicted before it happens."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from keepstep.records.identity import Record

__all__ = ["CoverageRecord", "DomainLoss", "LossOutcome", "StateSource"]

LossOutcome = Literal["kept_in_step", "steps_recomputed", "restart", "wait", "stop"]
"""What would happen: nothing is lost; all go back to a checkpoint; all begin again; all wait for a machine; the end."""

StateSource = Literal["replica", "mirror", "checkpoint", "nothing"]
"""Where the state of a lost rank would come from."""


class DomainLoss(msgspec.Struct, frozen=True, omit_defaults=True):
    """The predicted loss of one domain. `ranks` and `nodes` go with it; `sources` says from where their state comes."""

    domain: Annotated[str, Meta(description="KIND=LABEL")]
    nodes: Annotated[tuple[str, ...], Meta(description="nodes that go with it")]
    ranks: Annotated[tuple[int, ...], Meta(description="ranks that go with it")]
    outcome: Annotated[LossOutcome, Meta(description="predicted")]
    standbys_left: Annotated[int, Meta(ge=0, description="warm standbys elsewhere")] = 0
    places_left: Annotated[int, Meta(ge=0, description="room for fresh processes elsewhere")] = 0
    sources: Annotated[dict[StateSource, tuple[int, ...]], Meta(description="ranks by the best source left")] = {}
    steps_recomputed: Annotated[int, Meta(ge=0, description="steps done again, at most")] = 0
    why: Annotated[str, Meta(description="what decides it")] = ""


class CoverageRecord(Record, frozen=True, kw_only=True, tag=True):
    """For each domain what its loss would cost now: a prediction, nothing of it has happened."""

    domains: Annotated[tuple[DomainLoss, ...], Meta(description="the worst first")] = ()
    everywhere: Annotated[tuple[str, ...], Meta(description="domains that hold all nodes")] = ()
    notes: Annotated[tuple[str, ...], Meta(description="what could not be placed as wished")] = ()
