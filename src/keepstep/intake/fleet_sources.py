"""One door to all readers of the fleet: a kind and a stream in, pieces of tables out."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.fault_trace import read_fault_trace
from keepstep.intake.health_results import read_dcgm, read_gcm, read_interfaces, read_nhc, read_sysfs
from keepstep.intake.json_documents import element_batches, elements, json_lines, load_bytes
from keepstep.intake.kubernetes_objects import read_kubernetes
from keepstep.intake.node_states import node_document, read_events, read_nodes
from keepstep.intake.sacct_document import sacct_document
from keepstep.intake.sacct_export import read_sacct
from keepstep.intake.trace_tables import read_trace
from keepstep.intake.training_log import read_philly, read_training_log

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
            for found in element_batches(load_bytes(stream, where=how.where), "jobs", where=how.where):
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
        case "kubernetes":
            yield _kubernetes(stream, how)
        case "dcgm" | "interfaces" | "sysfs":
            yield _snapshot(kind, load_bytes(stream, where=how.where), how=how)
        case "gcm":
            yield from read_gcm(stream, cluster=how.cluster, node=how.node)
        case "nhc":
            yield from read_nhc(stream, zone=how.zone, cluster=how.cluster, node=how.node)
        case "training-log":
            yield from read_training_log(stream, cluster=how.cluster, where=how.where)
        case "philly":
            found = elements(load_bytes(stream, where=how.where), "jobs", where=how.where)
            yield read_philly(found, zone=how.zone, cluster=how.cluster)
        case "empty":
            yield Taken(notes=("the file is empty",))
        case _:
            raise RecordError(f"no reader for {kind}", where=how.where)


def _kubernetes(stream: BinaryIO, how: ReadAs) -> Taken:
    """Objects of a list, of one object, or of one object a line."""
    data = load_bytes(stream, where=how.where)
    aside: list[Aside] = []
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        document = None
    if isinstance(document, dict) and "items" not in document:
        items = [(1, document)]
    elif document is None and b'"items"' not in data[:4096]:
        items = []
        for number, one in json_lines(io.BytesIO(data)):
            if isinstance(one, Aside):
                aside.append(one)
            else:
                items.append((number, one))
    else:
        found = elements(data, "items", where=how.where)
        items, aside = list(found.items), list(found.aside)
    return read_kubernetes(items, cluster=how.cluster, aside=aside)


def _snapshot(kind: str, data: bytes, *, how: ReadAs) -> Taken:
    """A document about one node at one time."""
    document = _object(data, how.where)
    if kind == "dcgm":
        return read_dcgm(document, cluster=how.cluster, node=how.node, at=how.at, where=how.where)
    if kind == "interfaces":
        return read_interfaces(document, cluster=how.cluster, node=how.node, at=how.at, where=how.where)
    good = _object(how.good, "the good snapshot") if how.good else None
    return read_sysfs(document, good=good, cluster=how.cluster, node=how.node, at=how.at, where=how.where)


def _object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; text before and behind it (of dcgmi) is passed over."""
    begin, end = data.find(b"{"), data.rfind(b"}")
    try:
        document = msgspec.json.decode(data[begin : end + 1])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RecordError(f"no JSON, or cut off: {error}", where=where) from error
    if not isinstance(document, dict):
        raise RecordError("no JSON object", where=where)
    return document
