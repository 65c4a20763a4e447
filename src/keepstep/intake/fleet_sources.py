"""One door to all readers of the fleet: a kind and a stream in, pieces of tables out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken
from keepstep.intake.fault_trace import read_fault_trace
from keepstep.intake.json_documents import elements, load_bytes
from keepstep.intake.node_states import node_document, read_events, read_nodes
from keepstep.intake.sacct_document import sacct_document
from keepstep.intake.sacct_export import read_sacct
from keepstep.intake.trace_tables import read_trace

__all__ = ["ReadAs", "read_source"]


class ReadAs(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a source: the time zone and cluster where it does not say them, the node and time (microseconds)
    of a snapshot that names neither, and a good snapshot to compare others with."""

    where: str
    zone: str = "UTC"
    cluster: str = ""
    node: str = ""
    at: int | None = None
    good: bytes = b""


def read_source(kind: str, stream: BinaryIO, *, how: ReadAs) -> Iterator[Taken]:
    """What `stream` of `kind` (a key of KINDS) says, piece by piece.

    Raises RecordError if it lacks what cannot be done without.
    """
    match kind:
        case "sacct":
            yield from read_sacct(stream, zone=how.zone, cluster=how.cluster, where=how.where)
        case "sacct-json":
            found = elements(load_bytes(stream, where=how.where), "jobs", where=how.where)
            yield sacct_document(found, cluster=how.cluster)
        case "sacctmgr-events":
            yield from read_events(stream, zone=how.zone, cluster=how.cluster, where=how.where)
        case "scontrol-nodes":
            yield read_nodes(stream, zone=how.zone, cluster=how.cluster)
        case "nodes-json":
            found = elements(load_bytes(stream, where=how.where), "nodes", where=how.where)
            yield node_document(found, cluster=how.cluster)
        case "fault-trace":
            found = elements(load_bytes(stream, where=how.where), "events", where=how.where)
            yield read_fault_trace(found, cluster=how.cluster)
        case "trace-csv":
            yield from read_trace(stream, zone=how.zone, cluster=how.cluster, where=how.where)
        case "empty":
            yield Taken(notes=("the file is empty",))
        case _:
            raise RecordError(f"no reader for {kind}", where=how.where)
