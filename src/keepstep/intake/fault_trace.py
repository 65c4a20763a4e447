"""Traces of node faults in the form of InfiniteHBD: starts and ends of faults, in days from the begin of the trace."""

from __future__ import annotations

from typing import Any

from keepstep.intake.attempt_columns import Taken, taken_rows
from keepstep.intake.delimited_rows import Aside
from keepstep.intake.json_documents import Elements

__all__ = ["is_fault_trace", "read_fault_trace"]

_DAY_US = 86_400_000_000
_ORIGIN_NOTE = "days from the begin of the trace, written as days from 1970-01-01"


def is_fault_trace(item: object) -> bool:
    """Whether `item` is an event of such a trace."""
    return isinstance(item, dict) and {"node_id", "event_time", "event_type"} <= set(item)


def read_fault_trace(found: Elements, *, cluster: str) -> Taken:
    """One interval a fault; start and end are paired by node and full fault type, first start with first end.

    An end without a start goes aside; a start without an end is a fault that goes on.
    """
    open_: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    aside = list(found.aside)
    for index, item in found.items:
        try:
            kind = item.get("fault_type") or {}
            what = tuple(str(kind.get(name, "")) for name in ("Level", "Class", "Desc"))
            key, time = (str(item["node_id"]), *what), float(item["event_time"])
            event = str(item["event_type"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            aside.append(Aside(index, f"no event of a fault: {error}", str(item)[:200]))
            continue
        if not 0 <= time < 100_000 or event not in ("fault_start", "fault_end"):
            aside.append(Aside(index, f"no event of a fault: {event[:30]} at {time}", str(item)[:200]))
        elif event == "fault_start":
            row = _row(key, time, cluster=cluster)
            open_.setdefault(key, []).append(row)
            row["number"] = len(rows)
            rows.append(row)
        elif open_.get(key):
            open_[key].pop(0)["end"] = round(time * _DAY_US)
        else:
            aside.append(Aside(index, "the end of a fault that never began", str(item)[:200]))
    key_columns = ("node", "start", "level", "class", "description", "twin")
    for row in rows:
        row["twin"] = 0
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:  # two equal faults that begin at the same moment are two
        same = tuple(row[name] for name in key_columns[:-1])
        row["twin"] = seen.get(same, 0)
        seen[same] = row["twin"] + 1
    return Taken(aside=tuple(aside), tables={"node_intervals": taken_rows("node_intervals", rows, key=key_columns)})


def _row(key: tuple[str, ...], time: float, *, cluster: str) -> dict[str, Any]:
    node, level, sort, description = key
    return {
        "cluster": cluster or "infinitehbd",
        "node": node,
        "kind": "fault",
        "state_raw": "fault_start",
        "reason": "",
        "start": round(time * _DAY_US),
        "end": None,
        "level": level,
        "class": sort,
        "description": description,
        "start_note": _ORIGIN_NOTE,
    }
