"""A planned move as people ask for it, and the record of how it went."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from keepstep.records.identity import Record

__all__ = ["MOVE_MARKS", "MoveAsked", "MoveOutcome", "MoveRecord", "MoveRequest"]

MoveOutcome = Literal["made", "partly made", "not made"]

MOVE_MARKS = ("standby", "warmed", "prepared", "committed", "taken", "first_step")
"""What a move reaches, in order; each is a field of `MoveRecord` (with `_s` behind it)."""

_S = {"unit": "s from the request"}


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person asks of a running job: give `ranks` (or all ranks on `node`) to processes on node `to`.

    `to` is empty for any node but their own, if there is one. With `wait` the answer comes when the move is over.
    """

    ranks: tuple[int, ...]
    node: str = ""
    to: str = ""
    wait: bool = True


class MoveAsked(Record, frozen=True, kw_only=True, tag=True):
    """A person wants ranks moved."""

    request: Annotated[MoveRequest, Meta(description="which ranks, and where to")]


class MoveRecord(Record, frozen=True, kw_only=True, tag=True):
    """A planned move that is over: from which processes to which, when it reached what, and what the pause was.

    Times are seconds from the request, None where not reached.
    """

    number: Annotated[int, Meta(ge=1, description="counts the job's moves from 1")]
    outcome: Annotated[MoveOutcome, Meta(description="`not made`: training went on, or goes on, with the leavers")]
    ranks: Annotated[tuple[int, ...], Meta(description="ranks that were to move")]
    leavers: Annotated[tuple[str, ...], Meta(description="their processes before, in the order of `ranks`")]
    joiners: Annotated[tuple[str, ...], Meta(description="those that were to take them; empty: none was found")]
    origins: Annotated[tuple[str, ...], Meta(description="nodes of the leavers")]
    nodes: Annotated[tuple[str, ...], Meta(description="nodes of the joiners")]
    moved: Annotated[tuple[int, ...], Meta(description="ranks that did move")] = ()
    why: Annotated[str, Meta(description="why not, in words")] = ""
    refused: Annotated[int, Meta(ge=0, description="votes that did not pass")] = 0
    standby_s: Annotated[float | None, Meta(description="a warm process for every rank was there", extra=_S)] = None
    warmed_s: Annotated[float | None, Meta(description="the joiners had run the script's set-up", extra=_S)] = None
    prepared_s: Annotated[float | None, Meta(description="everybody could commit", extra=_S)] = None
    committed_s: Annotated[float | None, Meta(description="the vote had passed", extra=_S)] = None
    taken_s: Annotated[float | None, Meta(description="the joiners held the last state", extra=_S)] = None
    first_step_s: Annotated[float | None, Meta(description="their first step was complete", extra=_S)] = None
    pause: Annotated[
        dict[str, float],
        Meta(description="parts of the pause as the slowest joiner counted them, seconds; `bytes` copied in it"),
    ] = {}
    bytes_moved: Annotated[int, Meta(ge=0, description="copied beside training", extra={"unit": "B"})] = 0
