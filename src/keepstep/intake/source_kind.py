"""Which tool wrote a file: told from its beginning, never from its name alone."""

from __future__ import annotations

import re

from keepstep.intake.node_states import event_header
from keepstep.intake.sacct_fields import delimiter_of
from keepstep.intake.trace_tables import trace_header

__all__ = ["KINDS", "kind_of"]

KINDS = {
    "sacct": "sacct -P",
    "sacct-json": "sacct --json",
    "sacctmgr-events": "sacctmgr -P show event",
    "scontrol-nodes": "scontrol show node",
    "nodes-json": "scontrol show node --json, sinfo --json",
    "fault-trace": "trace of node faults (InfiniteHBD)",
    "kubernetes": "kubectl get pods,events,nodes -o json",
    "dcgm": "dcgmi diag -j",
    "gcm": "health checks of GCM, one JSON object a line",
    "interfaces": "network state of a node (ip -json)",
    "sysfs": "PCIe and network state of a node (/sys)",
    "nhc": "log of NHC (Node Health Check)",
    "keepstep-journal": "journal of a keepstep run",
    "training-log": "progress of a training run, one JSON object a line",
    "philly": "job log of Philly",
    "trace-csv": "CSV of a public trace (Acme, Helios, openb, ...) or of a table",
    "empty": "nothing",
}
"""Kinds of sources and what writes them."""

_NHC = re.compile(rb"nhc|node-mark-(?:off|on)line|Health check failed", re.IGNORECASE)
_KEYS = (
    (b'"DCGM', "dcgm"),
    (b'"intf_status"', "interfaces"),
    (b'"/sys/', "sysfs"),
    (b'"event_type"', "fault-trace"),
    (b'"jobs"', "sacct-json"),
    (b'"nodes"', "nodes-json"),
    (b'"apiVersion"', "kubernetes"),
    (b'"items"', "kubernetes"),
    (b'"attempts"', "philly"),
    (b'"test_categories"', "dcgm"),
)
_LINE_KEYS = (
    (b'"record"', "keepstep-journal"),
    (b'"health_check"', "gcm"),
    (b'"apiVersion"', "kubernetes"),
    (b'"step"', "training-log"),
)


def kind_of(head: bytes) -> str | None:
    """The kind of a source that begins with `head` (some 64 KB); None if nobody known writes so."""
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not begin:
        return "empty"
    first = begin.split(b"\n", 1)[0]
    if begin[:1] in b"{[":
        return _json_kind(begin, first)
    line = first.decode(errors="replace").strip("\r\n ")
    if first.startswith(b"NodeName="):
        return "scontrol-nodes"
    if event_header(line):
        return "sacctmgr-events"
    if trace_header(line):
        return "trace-csv"
    if delimiter_of(line):
        return "sacct"
    return "nhc" if _NHC.search(begin) else None


def _json_kind(begin: bytes, first: bytes) -> str | None:
    """The kind of JSON, one document or one object a line."""
    if first.startswith(b"{") and first.rstrip().endswith(b"}") and len(first) > 2:
        for key, kind in _LINE_KEYS:
            if key in first:
                return kind
    places = [(place, kind) for key, kind in _KEYS if (place := begin.find(key)) >= 0]
    top = [kind for _, kind in sorted(places)]
    for kind in ("kubernetes", "dcgm", "sacct-json", "nodes-json"):
        if kind in top:
            return kind if kind != "kubernetes" or b'"apiVersion"' in begin else top[0]
    return top[0] if top else None
