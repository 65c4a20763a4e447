"""Results of health checks: the log of NHC, GCM's one object a line, DCGM's diagnostic, snapshots of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from keepstep.errors import RecordError
from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.json_documents import json_lines, number, text
from keepstep.intake.local_times import UNKNOWN, moment_of, moments

__all__ = ["read_dcgm", "read_gcm", "read_interfaces", "read_nhc", "read_sysfs", "xid_of"]

_KEY = ("node", "check", "device", "time")
_OK, _WARN, _CRITICAL, _UNKNOWN_STATUS = 0, 1, 2, 3
_XID = re.compile(r"\bxid\b[^0-9]{0,40}?(\d{1,3})\b", re.IGNORECASE)
_MAX_LINE = 65536
_STAMP = re.compile(
    r"(?P<compact>\d{8} \d\d:\d\d:\d\d)|(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
)
_FAILED = re.compile(r"Health check failed:\s*(?P<check>[\w.-]+):?\s*(?P<message>.*)")
_OFFLINE = re.compile(r"node-mark-offline\s+(?P<node>[\w.-]+)\s+(?P<message>.*)")
_ONLINE = re.compile(r"node-mark-online\s+(?P<node>[\w.-]+)")
_SYSLOG_HOST = re.compile(
    r"^(?:<\d+>)?(?:\w{3} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+)\s+(?P<node>[A-Za-z][\w.-]*)\s+nhc"
)
_ON = re.compile(r"\bon (?:node )?(?P<node>[A-Za-z][\w-]*\d[\w.-]*)")
_BATCH = 50_000
_DCGM_STATUS = {"pass": _OK, "skip": _UNKNOWN_STATUS, "warn": _WARN, "fail": _CRITICAL, "not run": _UNKNOWN_STATUS}
_DCGM_KEYS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")


def xid_of(*texts: str) -> int | None:
    """The XID named in the first of `texts` that names one; else None."""
    return next((int(match[1]) for one in texts if (match := _XID.search(one))), None)


def _taken(rows: list[dict[str, Any]], aside: list[Aside]) -> Taken:
    return Taken(aside=tuple(aside), tables={"health_results": taken_rows("health_results", rows, key=_KEY)})


def read_nhc(stream: BinaryIO, *, zone: str, cluster: str, node: str) -> Iterator[Taken]:
    """Failed checks, and nodes marked off and on, from NHC's log (also through syslog).

    Lines that report no result are not rows. A result without a node (`node` is the default) or a time goes aside.
    """
    rows: list[dict[str, Any]] = []
    aside: list[Aside] = []
    line, count = stream.readline(_MAX_LINE), 0
    while line:
        count += 1
        words = line.decode(errors="replace").strip()
        row = _nhc_row(words, node)
        if row is not None:
            when = _nhc_time(words, zone)
            if not row["node"]:
                aside.append(Aside(count, "a result that names no node: give --node", words[:200]))
            elif when is None:
                aside.append(Aside(count, "a result without a time and year", words[:200]))
            else:
                rows.append({**row, "cluster": cluster, "time": when})
        if len(rows) >= _BATCH:
            yield _taken(rows, aside)
            rows, aside = [], []
        line = stream.readline(_MAX_LINE)
    yield _taken(rows, aside)


def _nhc_row(words: str, node: str) -> dict[str, Any] | None:
    host = _SYSLOG_HOST.match(words) or _ON.search(words)
    named = host["node"] if host else node
    row: dict[str, Any] = {"tool": "nhc", "severity": "low", "device": "", "status": _CRITICAL, "node": named}
    if match := _OFFLINE.search(words):
        check, _, message = match["message"].partition(":")
        row |= {"node": match["node"], "check": check.strip(), "message": message.strip(), "xid": xid_of(message)}
    elif match := _ONLINE.search(words):
        row |= {"node": match["node"], "check": "node", "status": _OK, "message": "marked online"}
    elif match := _FAILED.search(words):
        row |= {"check": match["check"], "message": match["message"], "xid": xid_of(match["message"])}
    else:
        return None
    return row


def _nhc_time(words: str, zone: str) -> int | None:
    match = _STAMP.search(words)
    if match is None:
        return None
    if match["compact"]:
        day, clock = match["compact"].split(" ")
        stamp = f"{day[:4]}-{day[4:6]}-{day[6:]}T{clock}"
    else:
        stamp = match["iso"].replace(" ", "T").replace(",", ".")
        if (exact := moment_of(stamp)) is not None:
            return exact
        stamp = stamp[:19]
    found = int(moments(pa.chunked_array([pa.array([stamp], pa.string())]), zone).early[0])
    return None if found == UNKNOWN else found


def read_gcm(stream: BinaryIO, *, cluster: str, node: str) -> Iterator[Taken]:
    """Results of GCM's checks (facebookresearch/gcm, HealthCheckLog), one JSON object a line.

    `result` is its exit code: 0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN.
    """
    rows: list[dict[str, Any]] = []
    aside: list[Aside] = []
    for line, item in json_lines(stream):
        if isinstance(item, Aside):
            aside.append(item)
            continue
        inner = item.get("message")
        fields = inner if isinstance(inner, dict) else item
        status = number(fields.get("result", fields.get("exit_code")))
        when = moment_of(fields.get("end_time") or fields.get("start_time") or fields.get("time"))
        where = text(fields.get("node")) or node
        if status is None or not 0 <= status <= 3 or when is None or not where or not fields.get("health_check"):
            reason = "no result: health_check, node, result 0 to 3 and a time are needed"
            aside.append(Aside(line, reason, str(item)[:200]))
            continue
        message = text(fields.get("_msg") or fields.get("msg"))
        rows.append(
            {
                "cluster": text(fields.get("cluster")) or cluster,
                "node": where,
                "device": text(fields.get("gpu_node_id")) if fields.get("gpu_node_id") != where else "",
                "check": text(fields.get("health_check")),
                "time": when,
                "status": status,
                "severity": text(fields.get("severity")),
                "xid": xid_of(message) if status else None,
                "job_id": text(fields.get("job_id")).replace("None", ""),
                "phase": text(fields.get("type")),
                "tool": "gcm",
                "message": message[:1000],
            }
        )
        if len(rows) >= _BATCH:
            yield _taken(rows, aside)
            rows, aside = [], []
    yield _taken(rows, aside)


def read_dcgm(document: Any, *, cluster: str, node: str, at: int | None, where: str) -> Taken:
    """Results of `dcgmi diag -j`, of DCGM 2 to 4, one a test and GPU (one a test where no GPU is named).

    Its output names neither node nor time: they are `node` and `at`, or fields `hostname` and `timestamp` beside it.
    Raises RecordError if it is no such output or if they are missing.
    """
    body = document if isinstance(document, dict) else {}
    host = text(body.get("hostname") or body.get("node")) or node
    when = moment_of(body.get("timestamp") or body.get("time")) or at
    if not host or when is None:
        raise RecordError("a DCGM diagnostic names no node or time", where=where, remedy="give --node and --at")
    root = next((body[key] for key in _DCGM_KEYS if isinstance(body.get(key), dict)), body)
    categories = root.get("test_categories")
    if not isinstance(categories, list):
        raise RecordError("no DCGM diagnostic: it has no test_categories", where=where)
    rows, aside = [], []
    for index, category in enumerate(categories, 1):
        tests = category.get("tests") if isinstance(category, dict) else None
        for test in tests if isinstance(tests, list) else ():
            found = [_dcgm_row(test, result) for result in _results(test)] if isinstance(test, dict) else []
            if not found:
                aside.append(Aside(index, "a test without results", str(test)[:200]))
            rows += [{**row, "cluster": cluster, "node": host, "time": when} for row in found]
    return _taken(rows, aside)


def _results(test: dict[str, Any]) -> list[dict[str, Any]]:
    results = [one for one in test.get("results") or [] if isinstance(one, dict)]
    summary = test.get("test_summary")
    return results or ([summary] if isinstance(summary, dict) else [])


def _dcgm_row(test: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    device = result.get("gpu_ids", result.get("gpu_id", result.get("entity_id")))
    device = ",".join(map(str, device)) if isinstance(device, list) else text(device)
    warnings = result.get("warnings") or []
    words = (
        [text(one.get("warning")) if isinstance(one, dict) else text(one) for one in warnings]
        if isinstance(warnings, list)
        else [text(warnings)]
    )
    message = "; ".join(word for word in [*words, text(result.get("info"))] if word)
    return {
        "check": f"dcgm {text(test.get('name'))}",
        "device": device,
        "status": _DCGM_STATUS.get(text(result.get("status")).lower(), _UNKNOWN_STATUS),
        "severity": "",
        "xid": xid_of(message),
        "phase": "diagnostic",
        "tool": "dcgm",
        "message": message[:1000],
    }


def read_interfaces(document: Any, *, cluster: str, node: str, at: int | None, where: str) -> Taken:
    """State of network interfaces (`intf_status`, `intf_ifcfg` of a snapshot): those that are to be up and are not.

    Interfaces without a configuration are not judged. Raises RecordError if node or time are not known.
    """
    _placed(node, at, where=where)
    configured = document.get("intf_ifcfg") or {}
    wanted = {name for name, one in configured.items() if isinstance(one, dict) and one.get("ONBOOT") != "no"}
    masters = {one.get("MASTER") for one in configured.values() if isinstance(one, dict)} - {None}
    rows, aside = [], []
    for index, one in enumerate(document.get("intf_status") or [], 1):
        if not isinstance(one, dict) or not one.get("ifname"):
            aside.append(Aside(index, "no interface", str(one)[:200]))
            continue
        state, kind = text(one.get("operstate")).upper(), text(one.get("link_type"))
        name = text(one["ifname"])
        if name in wanted | masters or kind == "infiniband":
            down = state not in ("UP", "UNKNOWN")
            rows.append(
                _state_row(
                    name,
                    "eth_operstate" if kind != "infiniband" else "ib_operstate",
                    bad=down,
                    said=f"operstate {state}",
                )
            )
    rows += [
        _state_row(name, "eth_operstate", bad=True, said="configured, but not there")
        for name in sorted(wanted - {text(one.get("ifname")) for one in document.get("intf_status") or []})
    ]
    return _taken([{**row, "cluster": cluster, "node": node, "time": at} for row in rows], aside)


def _state_row(device: str, check: str, *, bad: bool, said: str) -> dict[str, Any]:
    status = _CRITICAL if bad else _OK
    return {
        "device": device,
        "check": check,
        "status": status,
        "severity": "",
        "phase": "periodic",
        "tool": "gcm",
        "message": said,
    }


def _placed(node: str, at: int | None, *, where: str) -> None:
    if not node or at is None:
        missing = "node or time" if not node and at is None else "node" if not node else "time"
        raise RecordError(f"a snapshot that names no {missing}", where=where, remedy="give --node and --at")


_PORT = re.compile(r"/infiniband/(?P<device>\w+)/ports/(?P<port>\d+)/(?P<what>state|phys_state|rate)$")
_NET = re.compile(r"/net/(?P<device>\w+)/operstate$")
_NODE_DESC = re.compile(r"/infiniband/\w+/node_desc$")
_WANTED = {"state": "4: ACTIVE", "phys_state": "5: LinkUp"}


def read_sysfs(document: Any, *, good: Any, cluster: str, node: str, at: int | None, where: str) -> Taken:
    """State of InfiniBand ports and interfaces in a snapshot of /sys.

    A port must be active and linked, an interface up; a rate is judged only against `good`, a snapshot of a good
    node (None: there is none). The node is read from the adapters' description where they have one. Raises
    RecordError if node or time are not known.
    """
    described = [text(value).split() for path, value in document.items() if _NODE_DESC.search(path)]
    host = node or next((words[0] for words in described if words), "")
    _placed(host, at, where=where)
    rows = []
    for path, value in document.items():
        said = text(value).strip()
        if match := _PORT.search(path):
            device, what = f"{match['device']}:{match['port']}", match["what"]
            wanted = _WANTED.get(what) or (text(good.get(path)).strip() if isinstance(good, dict) else "")
            if wanted:
                bad = said != wanted
                rows.append(
                    _state_row(device, f"ib_{what}", bad=bad, said=f"{said}" + (f", expected {wanted}" if bad else ""))
                )
        elif match := _NET.search(path):
            check = "ib_operstate" if match["device"].startswith("ib") else "eth_operstate"
            rows.append(_state_row(match["device"], check, bad=said not in ("up", "unknown"), said=f"operstate {said}"))
    return _taken([{**row, "cluster": cluster, "node": host, "time": at} for row in rows], [])
