"""Faults of nodes as the report needs them: who, from when to when, of how many nodes, over which time."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from keepstep.fleet.episodes import Faults
from keepstep.service.fleet_report_data import FleetData

__all__ = ["DAY_US", "NodeFaults", "node_events", "node_faults"]

DAY_US = 86_400_000_000
"""Microseconds of a day."""
_RELATIVE_US = 3 * 366 * DAY_US

_FAULTS = """
SELECT cluster || '/' || node AS node, start, "end", level, class, description, kind FROM node_intervals
WHERE start IS NOT NULL AND kind IN ({kinds}) ORDER BY node, start, "end"
"""
_NAMES = """
SELECT DISTINCT cluster || '/' || node AS node FROM (
    SELECT cluster, node FROM inventory UNION ALL SELECT cluster, node FROM node_intervals
    UNION ALL SELECT cluster, node FROM health_results
    UNION ALL SELECT a.cluster, n.node FROM attempt_nodes n JOIN attempts a USING (attempt_id)
) ORDER BY node
"""
_BOUNDS = """
SELECT min(epoch_us(start)) AS low, max(epoch_us("end")) AS high, max(node_count) AS nodes FROM capacity
"""


class NodeFaults(msgspec.Struct, frozen=True):
    """Faults in days from `origin` [us since 1970]. `nodes` is how many nodes there are, `names` those known by name.

    `horizon` is the time of observation in days, `last` the last day anything was seen (never before the horizon).
    `level`, `kind` are columns beside the faults. `recorded` is False where times down had to stand for faults;
    `said` tells where numbers come from.
    """

    faults: Faults
    level: Any
    kind: Any
    names: tuple[str, ...]
    nodes: int
    origin: int
    horizon: float
    last: float
    recorded: bool
    said: str


def node_faults(data: FleetData) -> NodeFaults:
    """Intervals of the kind fault; where a fleet has none, those in which a node was down or failing."""
    rows = data.rows(_FAULTS.format(kinds="'fault'"))
    source, recorded = "recorded faults", rows.num_rows > 0
    if not recorded:
        rows = data.rows(_FAULTS.format(kinds="'down', 'failing'"))
        source = "times nodes were down or failing"
    names = tuple(data.rows(_NAMES)["node"].to_pylist())
    start, end = (_moments(rows, name) for name in ("start", "end"))
    bounds = data.rows(_BOUNDS).to_pylist()[0]
    origin = _origin(data, bounds["low"], starts=start)
    seen = [data.last, *(int(column.max()) for column in (start, end) if len(column))]
    latest = max(max(seen), bounds["high"] or 0)
    end = np.where(end < start, np.maximum(latest, start), end)
    last = (latest - origin) / DAY_US
    known = bounds["high"] if bounds["high"] and bounds["low"] is not None else None
    horizon = data.options.days or ((known - origin) / DAY_US if known else last)
    nodes = max(len(names), data.options.nodes or bounds["nodes"] or 0)
    index = np.searchsorted(np.array(names or [""]), np.array(rows["node"].to_pylist() or [], dtype=str))
    order = np.lexsort((end, start, index))
    faults = Faults(index[order], (start[order] - origin) / DAY_US, (end[order] - origin) / DAY_US)
    texts = [
        np.array([text or "" for text in rows[name].to_pylist()], dtype=object)[order] for name in ("level", "class")
    ]
    said = f"{source}; {nodes:,} nodes, {len(names):,} of them known by name; {horizon:,.1f} days"
    return NodeFaults(
        faults=faults,
        level=texts[0],
        kind=texts[1],
        names=names,
        nodes=nodes,
        origin=origin,
        horizon=horizon,
        last=max(horizon, math.ceil(last)),
        recorded=recorded,
        said=said,
    )


def _moments(rows: pa.Table, name: str) -> Any:
    return rows[name].cast(pa.int64()).fill_null(-(2**62)).to_numpy()


def _origin(data: FleetData, capacity: int | None, *, starts: Any) -> int:
    """Day 0: the begin of the capacity, 1970 for traces whose days have no date, else the first thing seen."""
    seen = [int(starts.min())] if len(starts) else []
    seen += [data.first] if data.last else []
    if capacity is not None:
        return min([int(capacity), *seen])
    return 0 if not seen or min(seen) < _RELATIVE_US else min(seen)


def node_events(known: NodeFaults, rows: pa.Table, *, time: str = "time") -> tuple[Any, Any]:
    """Node numbers and days of rows with `node` (cluster/name) and a time; -1 for nodes that are not known."""
    if not rows.num_rows:
        return np.empty(0, np.int64), np.empty(0)
    index = {name: number for number, name in enumerate(known.names)}
    coded = rows["node"].combine_chunks().dictionary_encode()
    numbers = np.array([index.get(name, -1) for name in coded.dictionary.to_pylist()], np.int64)
    days = (rows[time].cast(pa.int64()).to_numpy() - known.origin) / DAY_US
    return numbers[coded.indices.to_numpy()], days
