"""One fault and its repair: when each phase was reached, counted from the onset."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from keepstep.records.finding import FindingKind
from keepstep.records.identity import Record

__all__ = ["PHASES", "Incident"]

_S = {"unit": "s from onset"}

PHASES = (
    "onset",
    "detected",
    "decided",
    "fenced",
    "standby_chosen",
    "warmed",
    "connected",
    "copied",
    "joined",
    "first_valid_step",
)
"""The phases of a recovery in order; each is a field of `Incident`."""


class Incident(Record, frozen=True, kw_only=True, tag=True):
    """A recovery, complete. Phases are None where unknown or not reached; `rank` and `node` say who was lost.

    Where several ranks were lost as one, `ranks` says which and `domain` with what; `rank` is not set then.
    """

    kind: Annotated[FindingKind, Meta(description="kind of the finding behind it")]
    number: Annotated[int, Meta(description="counts the job's incidents from 1; 0: not numbered")] = 0
    onset_wall: Annotated[
        float,
        Meta(description="first collective that left its pattern; 0: unknown", extra={"unit": "s since 1970"}),
    ] = 0.0
    onset: Annotated[float | None, Meta(description="0 by definition", extra=_S)] = 0.0
    detected: Annotated[float | None, Meta(description="a fact of the loss reached the controller", extra=_S)] = None
    decided: Annotated[float | None, Meta(description="the order to change was given", extra=_S)] = None
    fenced: Annotated[float | None, Meta(description="the old member can do nothing any more", extra=_S)] = None
    standby_chosen: Annotated[float | None, Meta(description="the joiner was chosen", extra=_S)] = None
    warmed: Annotated[float | None, Meta(description="the joiner was ready to take state", extra=_S)] = None
    connected: Annotated[float | None, Meta(description="links to the joiner were up", extra=_S)] = None
    copied: Annotated[float | None, Meta(description="the joiner held the state", extra=_S)] = None
    joined: Annotated[float | None, Meta(description="the new generation was ordered to run", extra=_S)] = None
    first_valid_step: Annotated[float | None, Meta(description="the first step after it was kept", extra=_S)] = None
    injected: Annotated[float | None, Meta(description="a drill injected the fault (negative: before)", extra=_S)] = (
        None
    )
    steps_recomputed: Annotated[int, Meta(ge=0, description="kept steps that were done again")] = 0
    bytes_moved: Annotated[int, Meta(ge=0, description="state moved to joiners", extra={"unit": "B"})] = 0
    members_changed: Annotated[int, Meta(ge=0, description="members replaced")] = 0
    ranks: Annotated[tuple[int, ...], Meta(description="the ranks lost together, where they are several")] = ()
    domain: Annotated[str, Meta(description="what was lost as a whole, as KIND=LABEL")] = ""
    source: Annotated[
        str, Meta(description="where the lost state came from: replica, mirror, local, shared, start; empty: not known")
    ] = ""
    note: Annotated[str, Meta(description="what else a reader must know, e.g. how long a fresh process took")] = ""
