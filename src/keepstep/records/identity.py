"""The fields every journal record may carry: what it is about, when and where it was written."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from keepstep.records.schema import current_schema

__all__ = ["Record"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record"):
    """Base of all journal records: the schema version and the identity. Fields that do not apply are left out."""

    schema: Annotated[str, Meta(description="schema version, major.minor")] = msgspec.field(
        default_factory=current_schema
    )
    job: Annotated[str, Meta(description="the job's name")] = ""
    attempt: Annotated[int | None, Meta(description="whole restarts before this one")] = None
    generation: Annotated[int | None, Meta(description="membership; grows by one at every change")] = None
    group: Annotated[str | None, Meta(description="process group")] = None
    sequence: Annotated[int | None, Meta(description="number of a collective in its group and generation")] = None
    step: Annotated[int | None, Meta(description="optimizer update, from 0")] = None
    rank: Annotated[int | None, Meta(description="global rank; -1 is a standby")] = None
    role: Annotated[str | None, Meta(description="coordinates such as dp=0,tp=1")] = None
    member: Annotated[str | None, Meta(description="unique name of a process")] = None
    node: Annotated[str | None, Meta(description="name of a host")] = None
    device: Annotated[str | None, Meta(description="accelerator of the node")] = None
    link: Annotated[str | None, Meta(description="directed link between two members or ports")] = None
    path: Annotated[str | None, Meta(description="way of the bytes through the fabric")] = None
    wall: Annotated[float, Meta(description="wall clock; 0: unknown", extra={"unit": "s since 1970"})] = 0.0
    mono_ns: Annotated[int | None, Meta(description="monotonic clock of `host`", extra={"unit": "ns"})] = None
    host: Annotated[str | None, Meta(description="the host whose monotonic clock `mono_ns` is")] = None
