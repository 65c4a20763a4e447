"""What diagnosis says: a kind of fault, the sets of suspects that cannot be told apart, and the evidence."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from keepstep.records.identity import Record

__all__ = ["FINDING_KINDS", "LAYERS", "QUIET", "Finding", "FindingKind", "Layer", "Suspect"]

FindingKind = Literal[
    "noncommunication_hang",
    "communication_hang",
    "compute_slow",
    "communication_slow",
    "startup_never_arrived",
    "startup_died",
    "startup_disagrees",
    "collective_mismatch",
    "imbalance",
    "state_divergence",
    "crash",
    "reporter_silent",
    "healthy",
    "undetermined",
]
Layer = Literal[
    "hardware_gpu",
    "hardware_link",
    "host_cpu",
    "storage",
    "dataloader",
    "application",
    "software_library",
    "configuration",
    "undetermined",
]
FINDING_KINDS: tuple[FindingKind, ...] = get_args(FindingKind)
LAYERS: tuple[Layer, ...] = get_args(Layer)
QUIET: frozenset[str] = frozenset({"healthy", "imbalance", "undetermined"})
"""Kinds that are no alarm: they go into the journal and the log only."""


class Suspect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that may be at fault. Exactly what is set is meant: a rank, a node, a domain, coordinates, a link..."""

    rank: Annotated[int | None, Meta(description="global rank")] = None
    node: Annotated[str | None, Meta(description="host")] = None
    domain: Annotated[str | None, Meta(description="failure domain, KIND=LABEL: all nodes in it")] = None
    device: Annotated[str | None, Meta(description="accelerator; with `node` or `rank`")] = None
    pid: Annotated[int | None, Meta(description="process id on `node`, where no rank is known")] = None
    source: Annotated[int | None, Meta(description="sending side of this rank")] = None
    destination: Annotated[int | None, Meta(description="receiving side of this rank")] = None
    link: Annotated[tuple[int, int] | None, Meta(description="directed link: from rank, to rank")] = None
    dp: Annotated[int | None, Meta(description="data-parallel coordinate")] = None
    tp: Annotated[int | None, Meta(description="tensor-parallel coordinate")] = None
    stage: Annotated[int | None, Meta(description="pipeline stage")] = None
    ep: Annotated[int | None, Meta(description="expert-parallel coordinate")] = None


class Finding(Record, frozen=True, kw_only=True, tag=True):
    """One fault, or `healthy`, or `undetermined` with what is missing in `evidence`."""

    kind: Annotated[FindingKind, Meta(description="the class of the fault")]
    layer: Annotated[Layer, Meta(description="where the cause lies")] = "undetermined"
    suspects: Annotated[
        tuple[tuple[Suspect, ...], ...],
        Meta(description="each inner list is a set whose elements cannot be told apart"),
    ] = ()
    victims: Annotated[tuple[int, ...], Meta(description="ranks that only wait")] = ()
    confidence: Annotated[float, Meta(ge=0, le=1, description="how sure, 0 to 1")] = 1.0
    evidence: Annotated[tuple[str, ...], Meta(description="what leads to it, in order")] = ()
    next_probe: Annotated[str, Meta(description="what would split the sets")] = ""
    cost: Annotated[float | None, Meta(description="loss it causes", extra={"unit": "GPU-s per step"})] = None
    number: Annotated[int, Meta(ge=0, description="counts the job's findings from 1; 0: not numbered")] = 0
    status: Annotated[
        Literal["new", "updated", "ended"],
        Meta(description="`updated` and `ended` speak of the earlier record with the same `number`"),
    ] = "new"
    refers: Annotated[int | None, Meta(description="number of the finding that a probe narrowed")] = None
    bundle: Annotated[str, Meta(description="folder of the run directory with the evidence")] = ""
