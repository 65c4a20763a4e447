"""Exports of Kubernetes: pods as attempts, events and conditions of nodes as node intervals, nodes as inventory."""

from __future__ import annotations

import re
from typing import Any

from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.json_documents import text
from keepstep.intake.local_times import moment_of

__all__ = ["read_kubernetes"]

_GPU_KEYS = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "google.com/tpu", "aliyun.com/gpu")
_NAME_LABELS = (
    "training.kubeflow.org/job-name",
    "job-name",
    "batch.kubernetes.io/job-name",
    "app.kubernetes.io/name",
    "app",
)
_NODE_EVENTS = {
    "NodeNotReady": "down",
    "NodeNotSchedulable": "drain",
    "Rebooted": "down",
    "SystemOOM": "fault",
    "KernelOops": "fault",
    "NodeHasDiskPressure": "fault",
}
_GOOD_EVENTS = {"NodeReady": "down", "NodeSchedulable": "drain"}
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3}
_MANY = re.compile(r"(\d+(?:\.\d+)?)([mk]?)\Z")


def read_kubernetes(items: list[tuple[int, dict[str, Any]]], *, cluster: str, aside: list[Aside]) -> Taken:
    """Attempts, node intervals and inventory of objects of `kubectl get -o json` (lists, or one object a line)."""
    attempts: list[dict[str, Any]] = []
    inventory: list[dict[str, Any]] = []
    intervals: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for index, item in items:
        kind = text(item.get("kind")) or ("Event" if "involvedObject" in item else "Pod")
        try:
            if kind == "Pod":
                attempts.append(_pod(item, cluster))
            elif kind == "Event":
                events.append(item)
            elif kind == "Node":
                inventory.append(_node(item, cluster))
                intervals += _conditions(item, cluster)
            else:
                aside.append(Aside(index, f"no pod, event or node but {kind[:40]}", str(item)[:200]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            aside.append(Aside(index, f"not as Kubernetes writes it: {error}", str(item)[:200]))
    bad = [row for row in attempts if _wrong(row)]
    aside += [Aside(0, _wrong(row), row["job_id"]) for row in bad]
    good = [row for row in attempts if not _wrong(row)]
    intervals += _node_events(events, cluster, aside=aside)
    _preemptions(events, good)
    return Taken(
        taken_rows("attempts", good),
        None,
        tuple(aside),
        tables={
            "inventory": taken_rows("inventory", inventory),
            "node_intervals": taken_rows("node_intervals", intervals, key=("node", "start", "kind")),
        },
    )


def _wrong(row: dict[str, Any]) -> str:
    if not row["state"]:
        return "a pod without a phase that is known"
    if row["start"] is not None and row["end"] is not None and row["end"] < row["start"]:
        return "the end is before the start"
    return ""


def _amount(value: Any) -> float:
    match = _MANY.match(text(value))
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _asked(spec: dict[str, Any], keys: tuple[str, ...]) -> float:
    total = 0.0
    for container in spec.get("containers") or []:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        total += sum(_amount(amounts[key]) for key in keys if key in amounts)
    return total


def _pod(item: dict[str, Any], cluster: str) -> dict[str, Any]:
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {text(one.get("type")): one for one in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    began = moment_of(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None
    ended, code, signal, why = _ending(status)
    state = _state(text(status.get("phase")), text(status.get("reason")) or why, code=code)
    if state in ("FAILED", "COMPLETED", "PREEMPTED", "OUT_OF_MEMORY", "NODE_FAIL") and ended is None:
        ended = moment_of(meta.get("deletionTimestamp")) or _last_change(conditions)
    name = (
        next((text(labels[key]) for key in _NAME_LABELS if labels.get(key)), "") or _owner(meta) or text(meta["name"])
    )
    gpus = round(_asked(spec, _GPU_KEYS))
    running = state == "RUNNING"
    start = began or moment_of(status.get("startTime"))
    return {
        "cluster": cluster,
        "job_id": text(meta.get("uid")) or f"{text(meta.get('namespace'))}/{text(meta['name'])}",
        "name": name,
        "user": text(labels.get("user") or (meta.get("annotations") or {}).get("user") or meta.get("namespace")),
        "account": text(meta.get("namespace")),
        "partition": text((spec.get("nodeSelector") or {}).get("pool", "")),
        "qos": text(spec.get("priorityClassName")),
        "state": state,
        "exit_code": code,
        "exit_signal": signal,
        "submit": moment_of(meta.get("creationTimestamp")),
        "eligible": moment_of(meta.get("creationTimestamp")),
        "start": start,
        "end": None if running else ended,
        "last_seen": ended or start,
        "gpus": gpus if start else None,
        "gpus_asked": gpus,
        "node_count": 1 if spec.get("nodeName") else None,
        "cpus": round(_asked(spec, ("cpu",))) or None,
        "nodes": text(spec.get("nodeName")),
        "restarts": sum(int(one.get("restartCount") or 0) for one in status.get("containerStatuses") or []),
        "priority": spec.get("priority"),
        "reason": text(status.get("reason")) or text(scheduled.get("reason")),
        "comment": text(status.get("message"))[:1000],
    }


def _ending(status: dict[str, Any]) -> tuple[int | None, int | None, int | None, str]:
    """(end, exit code, signal, reason) of the container that ended worst."""
    worst: tuple[int | None, int | None, int | None, str] = (None, None, None, "")
    for one in status.get("containerStatuses") or []:
        ended = (one.get("state") or {}).get("terminated") or (one.get("lastState") or {}).get("terminated")
        if not isinstance(ended, dict):
            continue
        code = ended.get("exitCode")
        row = (moment_of(ended.get("finishedAt")), code, ended.get("signal") or 0, text(ended.get("reason")))
        if worst[1] in (None, 0) or (code or 0) > 0:
            worst = row
    return worst


def _state(phase: str, reason: str, *, code: int | None) -> str:
    if phase == "Failed":
        if reason in ("Preempted", "Preempting"):
            return "PREEMPTED"
        if reason in ("NodeLost", "NodeShutdown", "Terminated", "NodeAffinity", "UnexpectedAdmissionError"):
            return "NODE_FAIL" if reason != "UnexpectedAdmissionError" else "LAUNCH_FAILED"
        if reason == "DeadlineExceeded":
            return "TIMEOUT"
        return "OUT_OF_MEMORY" if reason == "OOMKilled" else "FAILED"
    return {"Succeeded": "COMPLETED", "Running": "RUNNING", "Pending": "PENDING", "Unknown": "NODE_FAIL"}.get(phase, "")


def _last_change(conditions: dict[str, Any]) -> int | None:
    found = [moment_of(one.get("lastTransitionTime")) for one in conditions.values()]
    return max((one for one in found if one is not None), default=None)


def _owner(meta: dict[str, Any]) -> str:
    owners = meta.get("ownerReferences") or []
    return text(owners[0].get("name")) if owners and isinstance(owners[0], dict) else ""


def _node(item: dict[str, Any], cluster: str) -> dict[str, Any]:
    meta, status = item["metadata"], item.get("status") or {}
    capacity = status.get("capacity") or {}
    ready: dict[str, Any] = next((one for one in status.get("conditions") or [] if one.get("type") == "Ready"), {})
    state = "READY" if ready.get("status") == "True" else "NOT_READY"
    return {
        "cluster": cluster,
        "node": text(meta["name"]),
        "gpus": round(sum(_amount(capacity[key]) for key in _GPU_KEYS if key in capacity)),
        "state": state + ("+UNSCHEDULABLE" if (item.get("spec") or {}).get("unschedulable") else ""),
        "features": ",".join(f"{key}={value}" for key, value in sorted((meta.get("labels") or {}).items()))[:1000],
    }


def _conditions(item: dict[str, Any], cluster: str) -> list[dict[str, Any]]:
    """Open intervals of a node that is not ready, or under pressure, since the condition changed."""
    rows = []
    for one in (item.get("status") or {}).get("conditions") or []:
        kind, status = text(one.get("type")), text(one.get("status"))
        bad = status != "True" if kind == "Ready" else status == "True" and kind != "Ready"
        start = moment_of(one.get("lastTransitionTime"))
        if bad and start is not None:
            rows.append(
                {
                    "cluster": cluster,
                    "node": text(item["metadata"]["name"]),
                    "kind": "down" if kind == "Ready" else "fault",
                    "state_raw": f"{kind}={status}",
                    "reason": f"{text(one.get('reason'))}: {text(one.get('message'))}"[:300],
                    "start": start,
                }
            )
    return rows


def _event_time(event: dict[str, Any]) -> int | None:
    return next(
        (
            moment
            for name in ("eventTime", "firstTimestamp", "lastTimestamp")
            if (moment := moment_of(event.get(name))) is not None
        ),
        None,
    )


def _node_events(events: list[dict[str, Any]], cluster: str, *, aside: list[Aside]) -> list[dict[str, Any]]:
    """Bad events of nodes open an interval, the good event of the same kind closes it."""
    rows: list[dict[str, Any]] = []
    open_: dict[tuple[str, str], dict[str, Any]] = {}
    timed = [(moment, event) for event in events if (moment := _event_time(event)) is not None]
    lost = len(events) - len(timed)
    if lost:
        aside.append(Aside(0, f"{lost} events without a time", ""))
    for moment, event in sorted(timed, key=lambda pair: pair[0]):
        about, reason = event.get("involvedObject") or event.get("regarding") or {}, text(event.get("reason"))
        node = text(about.get("name"))
        if text(about.get("kind")) != "Node" or not node:
            continue
        if reason in _NODE_EVENTS and (node, _NODE_EVENTS[reason]) not in open_:
            kind = _NODE_EVENTS[reason]
            row: dict[str, Any] = {
                "cluster": cluster,
                "node": node,
                "kind": kind,
                "state_raw": reason,
                "reason": f"{reason}: {text(event.get('message') or event.get('note'))}"[:300],
                "set_by": text((event.get("source") or {}).get("component")),
                "start": moment,
                "end": None if kind in _GOOD_EVENTS.values() else moment,
            }
            rows.append(row)
            if row["end"] is None:
                open_[node, kind] = row
        elif (node, _GOOD_EVENTS.get(reason, "")) in open_:
            open_.pop((node, _GOOD_EVENTS[reason]))["end"] = moment
    return rows


def _preemptions(events: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
    """Pods that an event says were preempted ended so, whatever their phase says."""
    uids = {
        text((event.get("involvedObject") or event.get("regarding") or {}).get("uid"))
        for event in events
        if text(event.get("reason")) == "Preempted"
    }
    for pod in pods:
        if pod["job_id"] in uids and pod["state"] in ("FAILED", "NODE_FAIL"):
            pod["state"] = "PREEMPTED"
