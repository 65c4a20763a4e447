"""Times in which nodes were not good: `sacctmgr show event`, `scontrol show node`, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside, Layout, read_rows
from keepstep.intake.hostlist import expand_hosts
from keepstep.intake.json_documents import Elements, flag_list, number, text
from keepstep.intake.local_times import UNKNOWN, moments
from keepstep.intake.sacct_values import gpus_of, number_of

__all__ = ["EVENT_COMMAND", "event_header", "interval_kind", "node_document", "read_events", "read_nodes"]

EVENT_COMMAND = (
    "sacctmgr -P show event start=2026-01-01 format=Cluster,NodeName,TimeStart,TimeEnd,State,StateRaw,Reason,User,TRES"
)
_SECOND_US = 1_000_000
_KINDS = (
    ("MAINT", "maintenance"),
    ("REBOOT", "maintenance"),
    ("DOWN", "down"),
    ("DRAIN", "drain"),
    ("FAIL", "failing"),
    ("NOT_RESPONDING", "down"),
    ("NO_RESPOND", "down"),
    ("RESERVED", "reserved"),
)
_HEADER = {"cluster", "nodename", "timestart", "timeend", "duration", "state", "stateraw", "reason", "user", "tres"}
_NODE_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_REASON = re.compile(r"Reason=(?P<why>.*?)\s*\[(?P<who>[^@\]]*)@(?P<when>[^\]]+)\]", re.DOTALL)
_GRES = re.compile(r"gpu(?::[^:,(]+)?:(\d+)", re.ASCII)
_MAX_NODE_TEXT = 1 << 20


def interval_kind(state: str) -> str:
    """down, drain, maintenance, failing, reserved or other, of a state as Slurm writes it (`DOWN*`, `IDLE+DRAIN`)."""
    word = state.upper()
    return next((kind for part, kind in _KINDS if part in word), "other")


def event_header(line: str) -> str | None:
    """The delimiter if `line` is the header of sacctmgr's events; else None."""
    for delimiter in ("|", ",", "\t"):
        names = {name.strip().lower() for name in line.strip().split(delimiter)} - {""}
        if {"nodename", "timestart"} <= names and names <= _HEADER:
            return delimiter
    return None


def read_events(stream: BinaryIO, *, zone: str, cluster: str, where: str) -> Iterator[Taken]:
    """Node intervals and sizes of clusters from `sacctmgr -P show event`.

    Raises RecordError if columns are absent without which an interval cannot be told.
    """
    header = stream.readline(65536).decode(errors="replace").strip("\r\n")
    delimiter = event_header(header)
    names = tuple(name.strip().lower() for name in header.split(delimiter or "|"))
    if delimiter is None or "timeend" not in names or not {"state", "stateraw"} & set(names):
        raise RecordError("columns missing: NodeName, TimeStart, TimeEnd, State", where=where, remedy=EVENT_COMMAND)
    closed = names[-1] == ""
    columns = names[:-1] if closed else names
    layout = Layout(
        columns=columns,
        delimiter=delimiter,
        closed=closed,
        use=frozenset(columns),
        free=frozenset({"reason"}),
        fits=lambda column, value: column not in ("timestart", "timeend") or value[:4].isdigit() or value == "Unknown",
    )
    for block in read_rows(stream, layout):
        rows = block.rows.to_pylist()
        if not rows:
            yield Taken(aside=block.aside)
            continue
        start, end = (moments(block.rows[name], zone) for name in ("timestart", "timeend"))
        bad = start.wrong | end.wrong | (start.early == UNKNOWN)
        bad |= (end.late != UNKNOWN) & (end.late < start.early)
        aside = [
            Aside(
                int(block.lines[i]), "no interval: the times make no sense", "|".join(map(str, rows[i].values()))[:200]
            )
            for i in np.flatnonzero(bad)
        ]
        times = [
            (None if s == UNKNOWN else int(s), None if e == UNKNOWN else int(e))
            for s, e in zip(start.early, end.late, strict=True)
        ]
        good = [(row, time) for row, time, wrong in zip(rows, times, bad, strict=True) if not wrong]
        nodes = [_event(row, time, cluster=cluster) for row, time in good if row.get("nodename")]
        sizes = [_size(row, time, cluster=cluster) for row, time in good if not row.get("nodename")]
        yield Taken(
            aside=(*block.aside, *aside),
            bad_bytes=block.bad_bytes,
            tables={
                "node_intervals": taken_rows("node_intervals", nodes, key=("node", "start")),
                "capacity": taken_rows("capacity", sizes),
            },
        )


def _event(row: dict[str, Any], time: tuple[int | None, int | None], *, cluster: str) -> dict[str, Any]:
    state = row.get("state") or row.get("stateraw") or ""
    return {
        "cluster": row.get("cluster") or cluster,
        "node": row["nodename"],
        "kind": interval_kind(state),
        "state_raw": state,
        "reason": row.get("reason") or "",
        "set_by": (row.get("user") or "").split("(")[0],
        "start": time[0],
        "end": time[1],
    }


def _size(row: dict[str, Any], time: tuple[int | None, int | None], *, cluster: str) -> dict[str, Any]:
    tres = row.get("tres") or ""
    parts = dict(part.split("=", 1) for part in tres.split(",") if "=" in part)
    return {
        "cluster": row.get("cluster") or cluster,
        "start": time[0],
        "end": time[1],
        "gpus": gpus_of(tres),
        "node_count": number_of(parts.get("node", "")),
        "cpus": number_of(parts.get("cpu", "")),
    }


def read_nodes(stream: BinaryIO, *, zone: str, cluster: str) -> Taken:
    """Nodes, and those that are down or drained with the time it was set, from `scontrol show node` (also with -o)."""
    nodes: list[dict[str, Any]] = []
    aside: list[Aside] = []
    for line, chunk in _node_texts(stream):
        try:
            nodes.append(_node(chunk, zone))
        except (KeyError, ValueError, RecordError) as error:
            aside.append(Aside(line, f"no node as scontrol shows it: {error}", chunk[:200]))
    return _nodes_taken(nodes, aside, cluster=cluster)


def _node_texts(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """(first line, text) of each node."""
    lines: list[str] = []
    begin = 1
    for number_, raw in enumerate(stream, 1):
        line = raw[:_MAX_NODE_TEXT].decode(errors="replace").rstrip("\r\n")
        if line.startswith("NodeName=") and lines:
            yield begin, "\n".join(lines)
            lines = []
        if line.strip():
            if not lines:
                begin = number_
            lines.append(line)
    if lines:
        yield begin, "\n".join(lines)


def _node(chunk: str, zone: str) -> dict[str, Any]:
    fields: dict[str, str] = {}
    matches = list(_NODE_FIELD.finditer(chunk))
    for match, after in zip(matches, [*matches[1:], None], strict=True):
        fields.setdefault(match[1], chunk[match.end() : after.start() if after else len(chunk)].strip())
    reason = _REASON.search(chunk)
    why, who, when = (reason["why"], reason["who"], reason["when"]) if reason else (fields.get("Reason", ""), "", "")
    set_at, boot = (_one_moment(value, zone) for value in (when, fields.get("BootTime", "")))
    gres = _GRES.findall(fields.get("Gres", ""))
    return {
        "node": fields["NodeName"].split()[0],
        "state": fields["State"].split()[0],
        "gpus": gpus_of(fields.get("CfgTRES", "")) or sum(map(int, gres)),
        "features": fields.get("ActiveFeatures", "").replace("(null)", ""),
        "partitions": fields.get("Partitions", ""),
        "boot": boot,
        "reason": why,
        "set_by": who,
        "set_at": set_at,
    }


def _one_moment(value: str, zone: str) -> int | None:
    import pyarrow as pa

    found = int(moments(pa.chunked_array([pa.array([value], pa.string())]), zone).early[0])
    return None if found == UNKNOWN else found


def node_document(found: Elements, *, cluster: str) -> Taken:
    """As `read_nodes`, of `scontrol show node --json` or the nodes of `sinfo --json`, 22.05 to 24.11 and later."""
    nodes, aside = [], list(found.aside)
    meta = found.rest.get("meta") if isinstance(found.rest.get("meta"), dict) else {}
    slurm = meta.get("slurm") or meta.get("Slurm") or {} if isinstance(meta, dict) else {}
    named = text(slurm.get("cluster")) if isinstance(slurm, dict) else ""
    for index, node in found.items:
        name = text(node.get("name"))
        if not name:
            aside.append(Aside(index, "no node: it has no name", str(node)[:200]))
            continue
        features, partitions = node.get("active_features"), node.get("partitions")
        set_at, boot = number(node.get("reason_changed_at")), number(node.get("boot_time"))
        nodes.append(
            {
                "node": name,
                "state": "+".join([*flag_list(node.get("state")), *flag_list(node.get("state_flags"))]),
                "gpus": gpus_of(text(node.get("tres"))) or sum(map(int, _GRES.findall(text(node.get("gres"))))),
                "features": ",".join(map(str, features)) if isinstance(features, list) else text(features),
                "partitions": ",".join(map(str, partitions)) if isinstance(partitions, list) else text(partitions),
                "boot": boot * _SECOND_US if boot else None,
                "reason": text(node.get("reason")),
                "set_by": text(node.get("reason_set_by_user")),
                "set_at": set_at * _SECOND_US if set_at else None,
            }
        )
    return _nodes_taken(nodes, aside, cluster=named or cluster)


def _nodes_taken(nodes: list[dict[str, Any]], aside: list[Aside], *, cluster: str) -> Taken:
    for node in nodes:
        node["cluster"] = cluster
    nodes = [{**node, "node": name} for node in nodes for name in expand_hosts(node["node"])]
    bad = [
        {
            **node,
            "kind": interval_kind(node["state"]),
            "state_raw": node["state"],
            "start": node["set_at"],
            "start_note": "set at this time, as the node says",
        }
        for node in nodes
        if interval_kind(node["state"]) not in ("other", "reserved") and node["set_at"] is not None
    ]
    return Taken(
        aside=tuple(aside),
        tables={
            "inventory": taken_rows("inventory", nodes),
            "node_intervals": taken_rows("node_intervals", bad, key=("node", "start")),
        },
    )
